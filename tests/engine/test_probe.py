# SPDX-License-Identifier: Apache-2.0
"""What the probe of a real engine measures is the attention that transformers computes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

from harness.observing import observations_of
from vtoken.signals import Measure, Observation
from worker.probed_layers import spread

pytestmark = pytest.mark.engine

WINDOW, NUM_LAYERS, PROBED = 32, 30, 4
TOLERANCE = 1e-4  # of the largest value; two float32 forwards differ by less


@pytest.fixture
def seen(start_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> list[Observation]:
    """Every measurement that reaches the scheduler of the shared engine."""
    return observations_of(start_engine().scheduler.reclaimer.policy_runs, monkeypatch)


@pytest.fixture(scope="module")
def eager(model: Path) -> Iterator[Any]:
    yield AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def attention(eager: Any, tokens: list[int], visible: torch.Tensor) -> torch.Tensor:
    """``[probed layers, heads, queries, keys]`` of the window's queries, by transformers."""
    layers = spread(NUM_LAYERS, PROBED)
    bias = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        weights = eager(
            input_ids=torch.tensor(tokens)[None],
            attention_mask=bias[None, None],
            output_attentions=True,
        ).attentions
    return torch.stack([weights[layer][0, :, -WINDOW:] for layer in layers])


def assert_close(measured: torch.Tensor, expected: torch.Tensor) -> None:
    assert (measured - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("policy", ["h2o", "tova", "scissorhands"])
def test_attention_of_a_prompt_is_that_of_transformers(
    start_engine: Callable[..., Any],
    seen: list[Observation],
    eager: Any,
    passages: list[list[int]],
    policy: str,
) -> None:
    """A prompt below the budget: everything is resident, and one chunk has computed it."""
    prompt = passages[3][:200]
    options = {"vtoken.policy": policy, "vtoken.budget_tokens": 400}
    sampling = SamplingParams(temperature=0, max_tokens=2, extra_args=options)
    start_engine().run([prompt], sampling)
    first = seen[0]
    assert first.probe.length == 200 and first.positions.tolist() == list(range(200))
    causal = torch.ones(200, 200, dtype=torch.bool).tril()
    weights = attention(eager, prompt, causal)
    expected = {
        Measure.MEAN_MASS: weights.mean((0, 1, 2)),
        Measure.LAST_MASS: weights[:, :, -1].mean((0, 1)),
        Measure.LOW_SHARE: (
            (weights * causal[-WINDOW:].sum(1)[:, None] < 0.9999) & causal[-WINDOW:]
        )
        .float()
        .mean((0, 1, 2)),
    }
    (measure,) = first.probe.measures
    measured = torch.from_numpy(first.values[0])
    if measure is Measure.LOW_SHARE:  # a weight on the edge may fall to either side
        assert (measured - expected[measure]).abs().mean() < 1e-4
    else:
        assert_close(measured, expected[measure])
    shuffled = expected[measure].roll(1)  # a control
    assert (measured - shuffled).abs().max() > 100 * TOLERANCE * shuffled.abs().max()


def test_attention_after_reclaims_is_over_what_is_left(
    start_engine: Callable[..., Any],
    seen: list[Observation],
    eager: Any,
    passages: list[list[int]],
    greedy: Callable[..., Any],
) -> None:
    """By the latest query, which has seen exactly the resident tokens. What came before has been
    computed with what was there then, which the audit trail tells."""
    engine = start_engine()
    options = {
        "vtoken.policy": "tova",
        "vtoken.budget_tokens": 96,
        "vtoken.tick_tokens": 16,
        "vtoken.evict_after_tokens": 96,
    }
    (output,) = engine.run([passages[5][:90]], greedy(options, 200))
    text = passages[5][:90] + list(output.outputs[0].token_ids)
    last = seen[-1]
    length = last.probe.length
    assert length >= 250 and last.positions.size <= 160
    unseen_from = torch.full((length,), length)
    for row in engine.audit_rows(output.request_id):
        if row["event"] == "reclaim" and row["first_query"] < length:
            unseen_from[row["positions"].tolist()] = row["first_query"]
    index = torch.arange(length)
    visible = (index[None, :] <= index[:, None]) & (index[:, None] < unseen_from[None, :])
    weights = attention(eager, text[:length], visible)[:, :, -1].mean((0, 1))
    positions = torch.from_numpy(last.positions.astype("int64"))
    assert set(positions.tolist()) == set(index[visible[-1]].tolist())
    assert_close(torch.from_numpy(last.values[0]), weights[positions])
