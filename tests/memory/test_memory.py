"""Evicted tokens become free blocks of vLLM's own pool, and admission uses them."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.engine

BLOCK_SIZE = 32
LENGTH = 2000
FULL = math.ceil(LENGTH / BLOCK_SIZE)
OPTIONS = {"policy": "random", "keep_ratio": 0.5}


def prompt(number: int, length: int, shared: int = 0) -> list[int]:
    head = [5 + i % 190 for i in range(shared)]
    return head + [5 + (number * 7 + i * (number + 2)) % 190 for i in range(length - shared)]


def run_to_end_of_text(engine: Any) -> list[str]:
    """Four requests, two of them behind a shared prefix, stopped a few tokens before they end."""
    engine.scheduler.reclaimer.audit.enabled = True
    names = [engine.add(prompt(i, 600, shared=256 * (i < 2)), LENGTH) for i in range(4)]
    requests = engine.scheduler.requests
    while len(requests) < 4 or min(r.num_computed_tokens for r in requests.values()) < LENGTH - 20:
        engine.step()
    return list(requests)[: len(names)]


def evictions(engine: Any) -> dict[str, list[tuple[int, list[int]]]]:
    """request -> (length of the text, positions) of each eviction, from the audit trail."""
    found = defaultdict(list)
    for row in engine.scheduler.reclaimer.audit.table().to_pylist():
        if row["event"] == "evict":
            found[row["request_id"][:9]].append((row["first_query"], row["positions"]))
    return found


def held_after_quiescence(engine: Any) -> dict[str, dict[str, int]]:
    """What each request holds in vLLM's pool once no plan has a gain, and what lives there."""
    names = run_to_end_of_text(engine)
    engine.scheduler.reclaimer.reclaim_now()
    while engine.scheduler.reclaimer.planner.draining:
        engine.step()
    evicted = evictions(engine)
    held = {}
    for name in names:
        row = engine.manager.req_to_blocks[name]
        shared = sum(block.ref_cnt > 1 for block in row) * BLOCK_SIZE
        dead = {p for _, positions in evicted[name[:9]] for p in positions if p >= shared}
        length = engine.scheduler.requests[name].num_computed_tokens
        held[name[:9]] = {
            "private": engine.private_blocks(name),
            "live": length - shared - len(dead),
        }
    return held


def test_reclaimed_rows_are_within_one_block_of_the_ideal(
    start_engine: Callable[..., Any],
) -> None:
    engine = start_engine(300, OPTIONS)
    held = held_after_quiescence(engine)
    assert engine.scheduler.depth == 2
    assert engine.scheduler.reclaimer.stats.plans_committed > 0
    for name, found in held.items():
        assert found["private"] <= math.ceil(found["live"] / BLOCK_SIZE) + 1, (name, found)
    ours = evictions(engine)
    engine.run()

    naive = start_engine(300, OPTIONS | {"backend": "whole_blocks"})
    held_by_naive = held_after_quiescence(naive)
    naive_evictions = evictions(naive)
    for name, found in held.items():
        common = min(len(ours[name]), len(naive_evictions[name]))
        assert common > 10
        assert ours[name][:common] == naive_evictions[name][:common]
        assert found["private"] <= 0.6 * held_by_naive[name]["private"], (found, held_by_naive)
    naive.run()


def test_seven_requests_run_in_the_memory_of_four(start_engine: Callable[..., Any]) -> None:
    engine = start_engine(4 * FULL, OPTIONS)
    for i in range(7):
        engine.add(prompt(i, 500), LENGTH)
    finished = engine.run()
    assert len(finished) == 7
    assert {len(output.outputs[0].token_ids) for output in finished} == {LENGTH - 500}
    assert engine.most_at_once >= 7
    assert engine.preemptions == 0


@pytest.mark.parametrize(("requests", "feasible"), [(4, True), (5, False)])
def test_stock_runs_four_on_the_same_pool(
    start_engine: Callable[..., Any], requests: int, feasible: bool
) -> None:
    engine = start_engine(4 * FULL, None)
    for i in range(requests):
        engine.add(prompt(i, 500), LENGTH)
    finished = engine.run()
    assert len(finished) == requests
    # Feasible: all of them run to the end without one being preempted.
    assert (engine.preemptions == 0) is feasible
