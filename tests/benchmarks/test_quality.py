"""What the quality harness counts with: ROUGE-L, and the exact model's masks and evictions."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.quality.agreement import kept_by, overlap
from benchmarks.quality.exact import Eviction, ExactModel, State
from benchmarks.quality.rouge import rouge_l
from worker.tiny_model import tiny_model


def common_subsequence(a: list[int], b: list[int]) -> int:
    """By its definition: every choice of tokens, recursively."""
    if not a or not b:
        return 0
    if a[-1] == b[-1]:
        return common_subsequence(a[:-1], b[:-1]) + 1
    return max(common_subsequence(a[:-1], b), common_subsequence(a, b[:-1]))


@pytest.mark.parametrize("seed", range(30))
def test_rouge_l_is_f1_of_the_longest_common_subsequence(seed: int) -> None:
    random = np.random.default_rng(seed)
    a, b = (random.integers(0, 4, random.integers(1, 9)).tolist() for _ in range(2))
    common = common_subsequence(a, b)
    precision, recall = common / len(a), common / len(b)
    f1 = 2 * precision * recall / (precision + recall) if common else 0
    assert rouge_l(a, b) == pytest.approx(f1)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> ExactModel:
    return ExactModel(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


TEXT = [5 + (i * i * 13) % 240 for i in range(200)]


def plain(exact: ExactModel, visible: torch.Tensor) -> np.ndarray:
    """Logprobs of the text in one forward with this mask."""
    bias = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        logits = exact.model(
            input_ids=torch.tensor(TEXT)[None], attention_mask=bias[None, None], use_cache=False
        ).logits[0]
    following = torch.tensor(TEXT[1:])[:, None]
    return logits[:-1].double().log_softmax(-1).gather(1, following)[:, 0].numpy()


def test_everything_kept_in_chunks_is_one_causal_forward(exact: ExactModel) -> None:
    causal = torch.ones(200, 200, dtype=torch.bool).tril()
    found = exact.logprobs(TEXT, Eviction("keep_all", 1.0), 64)
    assert np.allclose(found, plain(exact, causal), atol=1e-4)


def test_what_is_evicted_after_a_chunk_is_not_seen_by_the_next(exact: ExactModel) -> None:
    """StreamingLLM, whose choice is known without any score: 4 sinks and the latest tokens."""
    visible = torch.ones(200, 200, dtype=torch.bool).tril()
    for end in (64, 128, 192):
        visible[end:, 4 : end - max(end // 2 - 4, 32)] = False
    found = exact.logprobs(TEXT, Eviction("streaming_llm", 0.5), 64)
    assert np.allclose(found, plain(exact, visible), atol=1e-4)
    causal = torch.ones(200, 200, dtype=torch.bool).tril()
    assert not np.allclose(found, plain(exact, causal), atol=1e-2), "a control"


@pytest.mark.parametrize(
    "policy", ["h2o", "scissorhands", "snapkv", "tova", "key_norm", "key_diff"]
)
def test_a_policy_that_looks_keeps_its_share_and_the_protected(
    exact: ExactModel, policy: str
) -> None:
    state = State(Eviction(policy, 0.5))
    for start in (0, 100):
        exact.feed(state, TEXT[start : start + 100])
        state.evict()
    assert int(state.live.sum()) == 100
    assert state.live[:4].all() and state.live[-32:].all()


def test_the_better_half_is_kept_with_the_protected() -> None:
    scores = np.arange(100.0)
    assert kept_by(scores) == {*range(4), *range(54, 100)}
    assert overlap({1, 2, 3}, {2, 3, 4, 5}) == 0.5


def test_texts_are_long_enough_for_every_part(tmp_path: Path) -> None:
    from benchmarks.quality.texts import passages, windows

    model = tiny_model(tmp_path / "tiny")
    assert len(windows(model, 8, 4096)) == 8
    found = passages(model, 144, 256)
    assert len({tuple(passage) for passage in found}) >= 140
    with pytest.raises(ValueError, match="do not hold"):
        passages(model, 10_000, 256)
