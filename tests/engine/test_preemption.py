# SPDX-License-Identifier: Apache-2.0
"""A preempted request is computed again from position 0 and evicted from anew: what it chose
before is explained by its old incarnation, what it chooses afterwards by its new one."""

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.oracle import Case, Oracle, make_case
from worker.tiny_model import tiny_model

pytestmark = pytest.mark.engine


def watch_starts(engine: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Request id -> how many tokens were chosen when each of its incarnations began."""
    starts: dict[str, list[int]] = defaultdict(list)
    scheduler = engine.scheduler
    begin = scheduler._start

    def start(request_id: str, output: Any) -> None:
        starts[request_id].append(scheduler.requests[request_id].num_output_tokens)
        begin(request_id, output)

    monkeypatch.setattr(scheduler, "_start", start)
    return starts


def parts(engine: Any, output: Any, starts: list[int]) -> list[Case]:
    """The output cut where an incarnation ends, each part with its own incarnation's reclaims."""
    rows = engine.audit_rows(output.request_id)
    incarnations = [row["incarnation"] for row in rows if row["event"] == "start"]
    ends = [*starts, len(output.outputs[0].token_ids)]
    return [
        make_case(output, [r for r in rows if r["incarnation"] == incarnation]).part(first, last)
        for incarnation, (first, last) in zip(incarnations, pairwise(ends), strict=True)
    ]


def test_each_incarnation_explains_what_was_chosen_in_it(
    engine: Any,
    evicting: Callable[..., Any],
    oracle: Oracle,
    passages: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts = watch_starts(engine, monkeypatch)

    def preempt_all_once() -> None:
        running = engine.scheduler.running
        chosen = min((request.num_output_tokens for request in running), default=0)
        if chosen >= 80 and not any(request.num_preemptions for request in running):
            engine.llm.reset_prefix_cache(reset_running_requests=True)

    prompts = [passages[0][:100], passages[1][:200]]
    outputs = engine.run(prompts, evicting("random", 160), preempt_all_once)
    for output in outputs:
        before, after = parts(engine, output, starts[output.request_id])
        assert len(before.reclaims) >= 2 and len(after.reclaims) >= 3
        assert all(verdict.agrees for verdict in oracle.judge_all([before, after]))
        assert not oracle.judge(after.believing(before.reclaims)).agrees


def test_naive_eviction_in_a_pool_that_is_too_small_is_explained_too(
    start_engine: Callable[..., Any],
    evicting: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM itself preempts, several times, with outputs in flight."""
    model = tiny_model(tmp_path)
    options = {"policy": "keep_all", "reclaim": "eager", "theta_f": 0, "backend": "whole_blocks"}
    engine = start_engine(
        model=str(model),
        max_model_len=384,
        num_gpu_blocks_override=13,
        additional_config={"vtoken": options},
    )
    starts = watch_starts(engine, monkeypatch)
    prompts = [[(7 * i + j * j) % 256 for j in range(60 + 12 * i)] for i in range(5)]
    outputs = engine.run(prompts, evicting("streaming_llm", 180))
    cut = [parts(engine, output, starts[output.request_id]) for output in outputs]
    assert sum(sum(bool(case.tokens) for case in cases) >= 2 for cases in cut) >= 2
    cases = [case for cases in cut for case in cases if case.tokens]
    oracle = Oracle(model)
    verdicts = oracle.judge_all(cases)
    assert all(verdict.agrees for verdict in verdicts), verdicts
    evicted = [case for case in cases if case.share_reclaimed >= 0.2]
    assert len(evicted) >= 4
    assert not any(v.agrees for v in oracle.judge_all([case.believing(()) for case in evicted]))
