# SPDX-License-Identifier: Apache-2.0
"""Moving tokens changes nothing: every full private block goes elsewhere again and again, no
token is dropped, and the output stays that of stock vLLM.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from harness.relocating import relocate_everything
from vtoken.plan import RelocationPlan

pytestmark = pytest.mark.engine

# Eviction machinery on, and nothing to evict.
KEEP_EVERYTHING = {"vtoken.policy": "random", "vtoken.keep_ratio": 1.0}
NUM_PROMPTS_OF_CONTROLS = 8
STEPS_BETWEEN = 10


class Relocations:
    """Relocates everything every few steps, and keeps the plans whose copies were made."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.monkeypatch = monkeypatch
        self.steps = 0
        self.plans: list[RelocationPlan] = []
        self.after_copy(self.plans.append)

    def after_step(self) -> None:
        self.steps += 1
        if self.steps % STEPS_BETWEEN == 0:
            self.engine.scheduler.reclaimer.reclaim_now()

    def after_copy(self, action: Callable[[RelocationPlan], None]) -> None:
        """Do something more at the end of every copy."""
        copies = self.engine.shard.engine
        start = copies.start

        def start_and_act(plans: Sequence[RelocationPlan]) -> None:
            start(plans)
            for plan in plans:
                action(plan)

        self.monkeypatch.setattr(copies, "start", start_and_act)

    def switch_checks_off(self) -> None:
        self.monkeypatch.setattr(self.engine.shard, "check", False)


@pytest.fixture
def relocations(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Relocations:
    planner = engine.scheduler.reclaimer.planner
    relocate_everything(planner, monkeypatch)
    return Relocations(engine, monkeypatch)


class WrongKey:
    """Overwrites the K of the first token of the first plan by that of the fourth; V stays."""

    def __init__(self, copies: Any) -> None:
        self.copies = copies
        self.request_id = ""

    def __call__(self, plan: RelocationPlan) -> None:
        if self.request_id:
            return
        self.request_id = plan.request_id
        _, slots = plan.moves()
        size, head_size = self.copies.block_size, self.copies.head_size
        keys = self.copies._index_S2D[:, :head_size]
        (block, wrong), (_, other) = (divmod(int(slots[i]), size) for i in (0, 3))
        for flat in self.copies._flat:
            flat[block, :, keys[wrong]] = flat[block, :, keys[other]]


def texts(outputs: list[Any]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_moving_every_private_block_again_and_again_changes_no_output(
    engine: Any,
    relocations: Relocations,
    prompts: list[list[int]],
    stock_outputs: list[dict[str, Any]],
    greedy: Any,
) -> None:
    outputs = engine.run(prompts, greedy(KEEP_EVERYTHING), relocations.after_step)
    for output in outputs:
        rows = [r for r in engine.audit_rows(output.request_id) if r["event"] == "reclaim"]
        assert len(rows) >= 4
        assert all(r["blocks_before"] == r["blocks_after"] >= 2 for r in rows)
        assert not any(len(r["positions"]) for r in rows)
    for plan in relocations.plans:
        assert plan.kept.all() and (np.diff(plan.source_indices) == 1).all()
        assert not set(plan.source_blocks.tolist()) & set(plan.destination_blocks.tolist())
    assert texts(outputs) == [stock["text"] for stock in stock_outputs]
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    assert tokens == [stock["token_ids"] for stock in stock_outputs]


def test_a_key_taken_from_another_token_changes_the_output(
    engine: Any,
    relocations: Relocations,
    prompts: list[list[int]],
    stock_outputs: list[dict[str, Any]],
    greedy: Any,
) -> None:
    relocations.switch_checks_off()
    fault = WrongKey(engine.shard.engine)
    relocations.after_copy(fault)
    outputs = engine.run(
        prompts[:NUM_PROMPTS_OF_CONTROLS], greedy(KEEP_EVERYTHING), relocations.after_step
    )
    same = {
        output.request_id: output.outputs[0].text == stock["text"]
        for output, stock in zip(outputs, stock_outputs, strict=False)
    }
    assert not same.pop(fault.request_id)
    assert all(same.values())


def test_a_wrong_copy_is_refused_when_checks_are_on(
    engine: Any,
    relocations: Relocations,
    prompts: list[list[int]],
    stock_outputs: list[dict[str, Any]],
    greedy: Any,
) -> None:
    aborted = engine.scheduler.reclaimer.stats.plans_aborted
    before = aborted["refused"]
    relocations.after_copy(WrongKey(engine.shard.engine))
    outputs = engine.run(
        prompts[:NUM_PROMPTS_OF_CONTROLS], greedy(KEEP_EVERYTHING), relocations.after_step
    )
    assert aborted["refused"] == before + 1
    assert texts(outputs) == [s["text"] for s in stock_outputs[:NUM_PROMPTS_OF_CONTROLS]]
