"""What the probe of an engine with full CUDA graphs measures is the attention of transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.observing import observations_of
from vtoken.signals import Measure, Observation

pytestmark = pytest.mark.gpu

# Of the largest value: the engine computes in bf16, transformers here in float32.
TOLERANCE = 0.05


@pytest.fixture
def seen(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[Observation]:
    """Every measurement that reaches the scheduler."""
    return observations_of(engine.scheduler.reclaimer.policy_runs, monkeypatch)


@pytest.fixture(scope="module")
def eager(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def attention(eager: Any, tokens: list[int]) -> torch.Tensor:
    """``[layers, heads, queries, keys]``"""
    with torch.inference_mode():
        weights = eager(input_ids=torch.tensor(tokens)[None], output_attentions=True).attentions
    return torch.cat(list(weights))


@pytest.mark.parametrize("policy", ["h2o", "tova"])
def test_attention_is_that_of_transformers(
    engine: Any,
    seen: list[Observation],
    eager: Any,
    greedy: Callable[..., Any],
    policy: str,
) -> None:
    """Of the prompt, computed in pieces of graphs, and while decoding, when a whole graph replays
    and no Python runs inside the forward."""
    prompt = [5 + (i * i * 7) % 240 for i in range(150)]
    (tokens,) = engine.run([prompt], greedy(policy=policy, budget_tokens=900))
    assert [o.probe.length for o in seen][:3] == [150, 214, 278]
    for observation in seen[:3]:
        length = observation.probe.length
        weights = attention(eager, (prompt + tokens)[:length])
        mean = weights.mean((0, 1))
        latest = mean[-observation.probe.num_queries :].mean(0)
        (measure,) = observation.probe.measures
        expected = mean[-1] if measure is Measure.LAST_MASS else latest
        measured = torch.from_numpy(observation.values[0])
        largest = expected.abs().max()
        assert (measured - expected).abs().max() <= TOLERANCE * largest
        older = mean[-2] if measure is Measure.LAST_MASS else mean[: length // 2].mean(0)
        assert (measured - older).abs().max() > TOLERANCE * largest, "a control: other queries"


def test_a_policy_that_looks_gives_blocks_back(engine: Any, greedy: Callable[..., Any]) -> None:
    prompts = [[5 + (n * 37 + i * 11) % 240 for i in range(300)] for n in range(8)]
    before = engine.scheduler.reclaimer.stats.blocks_given_back
    engine.run(prompts, greedy(policy="h2o", budget_tokens=128))
    assert engine.scheduler.reclaimer.stats.blocks_given_back - before >= 8 * 10
