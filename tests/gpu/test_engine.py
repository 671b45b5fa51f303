# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 runner on a GPU, with CUDA graphs, compilation, async scheduling and prefix caching."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from harness.relocating import relocate_everything
from vtoken.plan import RelocationPlan

pytestmark = pytest.mark.gpu

STEPS_BETWEEN = 10


class Relocations:
    """Moves every full private block every few steps, without dropping a token."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        planner = engine.scheduler.reclaimer.planner
        relocate_everything(planner, monkeypatch)
        self.engine, self.monkeypatch, self.steps = engine, monkeypatch, 0

    def after_step(self) -> None:
        self.steps += 1
        if self.steps % STEPS_BETWEEN == 0:
            self.engine.scheduler.reclaimer.reclaim_now()


@pytest.fixture
def relocations(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Relocations:
    return Relocations(engine, monkeypatch)


def committed(engine: Any) -> int:
    return engine.scheduler.reclaimer.stats.plans_committed


def test_the_runner_is_the_one_that_users_get(engine: Any) -> None:
    config = engine.llm.llm_engine.vllm_config
    scheduler, compilation = config.scheduler_config, config.compilation_config
    assert config.use_v2_model_runner and scheduler.async_scheduling
    assert scheduler.enable_chunked_prefill and config.cache_config.enable_prefix_caching
    assert compilation.mode.name == "VLLM_COMPILE"
    assert compilation.cudagraph_mode.name == "FULL_AND_PIECEWISE"


def test_preparing_attention_never_waits_for_the_device(
    engine: Any, prompts: list[list[int]], greedy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, shifted = engine.runner, 0

    def strict(function: Any) -> Any:
        def call(input_batch: Any) -> Any:
            nonlocal shifted
            shifted += bool(runner._shift_np[input_batch.idx_mapping_np].any())
            torch.cuda.set_sync_debug_mode("error")
            try:
                return function(input_batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    for name in ("prepare_attn", "_physical"):
        monkeypatch.setattr(runner, name, strict(getattr(runner, name)))
    engine.run(prompts, greedy(policy="random", keep_ratio=0.5, tick_tokens=16, recent=16))
    assert shifted > 100, "rows had a shift"
    with pytest.raises(RuntimeError, match="synchroniz"):
        strict(lambda batch: batch.seq_lens[0].item())(runner_batch(runner))


def runner_batch(runner: Any) -> Any:
    """As much of a batch as the control looks at."""
    lengths = torch.ones(1, device=runner.device)
    return SimpleNamespace(idx_mapping_np=np.zeros(1, np.int64), seq_lens=lengths)


def test_nothing_evicted_nothing_changed(
    engine: Any, prompts: list[list[int]], greedy: Any, stock_tokens: list[list[int]]
) -> None:
    before = engine.runner.num_hook_calls
    assert engine.run(prompts, greedy(policy="keep_all")) == stock_tokens
    assert engine.runner.num_hook_calls > before


def test_moving_every_private_block_again_and_again_changes_no_output(
    engine: Any,
    relocations: Relocations,
    prompts: list[list[int]],
    greedy: Any,
    stock_tokens: list[list[int]],
) -> None:
    before = committed(engine)
    sampling = greedy(policy="random", keep_ratio=1.0)
    assert engine.run(prompts, sampling, relocations.after_step) == stock_tokens
    assert committed(engine) - before >= 4 * len(prompts)


def test_a_token_taken_from_elsewhere_changes_the_output(
    engine: Any,
    relocations: Relocations,
    prompts: list[list[int]],
    greedy: Any,
    stock_tokens: list[list[int]],
) -> None:
    monkeypatch = relocations.monkeypatch
    shard, copies = engine.runner.shard, engine.runner.shard.engine
    monkeypatch.setattr(shard, "check", False)
    start, broken = copies.start, []

    def start_and_break(plans: Sequence[RelocationPlan]) -> None:
        start(plans)
        if not broken:
            broken.append(plans[0].request_id)
            _, slots = plans[0].moves()
            (block, wrong), (_, other) = (divmod(int(slots[i]), copies.block_size) for i in (0, 3))
            copies.stream.synchronize()
            for cache in copies._caches:
                cache[block, :, wrong] = cache[block, :, other]

    monkeypatch.setattr(copies, "start", start_and_break)
    sampling = greedy(policy="random", keep_ratio=1.0)
    tokens = engine.run(prompts, sampling, relocations.after_step)
    assert broken and tokens != stock_tokens


def test_eviction_gives_blocks_back_and_the_pool_ends_as_it_was(
    engine: Any, prompts: list[list[int]], greedy: Any, stock_tokens: list[list[int]]
) -> None:
    reclaimer = engine.scheduler.reclaimer
    free, before = reclaimer.port.num_free(), committed(engine)
    aborted = dict(reclaimer.stats.plans_aborted)
    sampling = greedy(policy="random", keep_ratio=0.5, tick_tokens=16, recent=16)
    tokens = engine.run(prompts, sampling)
    assert tokens != stock_tokens, "a control: eviction is seen"
    assert committed(engine) - before >= 2 * len(prompts)
    assert not {"refused", "diverged"} & set(reclaimer.stats.plans_aborted) - set(aborted)
    assert reclaimer.port.num_free() == free


def test_holes_are_filled_in_place_and_the_pool_ends_as_it_was(
    engine: Any, prompts: list[list[int]], greedy: Any, stock_tokens: list[list[int]]
) -> None:
    """Bytes, tables and ledger are checked online, at every filling."""
    reclaimer, steps = engine.scheduler.reclaimer, iter(range(10**6))
    free, before = reclaimer.port.num_free(), reclaimer.stats.holes_filled

    def ask_for_all_there_is() -> None:
        if next(steps) % 8 == 0:
            reclaimer.room.make(free)

    sampling = greedy(policy="random", keep_ratio=0.5, tick_tokens=500, recent=16)
    tokens = engine.run(prompts, sampling, ask_for_all_there_is)
    assert tokens != stock_tokens, "a control: eviction is seen"
    assert reclaimer.stats.holes_filled - before >= 2 * len(prompts)
    assert reclaimer.port.num_free() == free
