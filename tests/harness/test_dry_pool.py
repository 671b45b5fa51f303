"""When blocks run out: holes are filled before anybody is preempted."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from harness.oracle import ContentViolation
from harness.replica import BLOCK_SIZE, Replica, Setting, prompt
from harness.scenes import KEEP_HALF, step_until
from harness.traffic import run_traffic
from scheduler.admission import (
    Demand,
    Footprint,
    footprint_of,
    headroom_blocks,
    required_blocks,
    worst_blocks,
)
from worker.admission import Admission
from worker.block_manager import PoolPort

Make = Callable[..., Replica]

LIMITS = [
    {"budget_tokens": 40},
    {"budget_tokens": 100, "recent": 40},
    {"keep_ratio": 0.3},
    {"keep_ratio": 0.7, "tick_tokens": 200},  # booked with nearly its full length
    {"budget_tokens": 92, "recent": 8, "tick_tokens": 4},
]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("backend", ["lazy_compaction", "hole_filling", "no plan fits"])
@pytest.mark.parametrize("policy", ["random", "h2o"])
def test_who_was_admitted_by_its_cap_is_never_preempted(
    depth: int, limits: dict[str, float], backend: str, policy: str
) -> None:
    """Copies are late all the time, policies would rarely run, and texts share their heads."""
    vtoken = {"reclaim": "pressure", "low_water": 0, "headroom": 0}
    vtoken["backend"] = "hole_filling" if backend == "hole_filling" else "lazy_compaction"
    replica = Replica(Setting(depth=depth, num_blocks=34, stops=False, vtoken=vtoken))
    if backend == "no plan fits":
        replica.scheduler.reclaimer.planner.proposals = lambda blocked: []
    options = {"policy": policy, "sinks": 0, "evict_after_tokens": 0, "recent": 1} | limits
    most = 0
    for i in range(24):
        replica.arrive(prompt(i % 3, 40 + 61 * i % 300), 40 + 29 * i % 150, **options)
    for step in range(3000):
        replica.schedule(lag=step % 4)
        most = max(most, len(replica.scheduler.running))
    assert not replica.scheduler.has_requests() and replica.counts["finished"] == 24
    replica.run_to_the_end()
    replica.check_clean()
    stats = replica.scheduler.reclaimer.stats
    assert most >= 4
    if "tick_tokens" not in limits or limits["tick_tokens"] < 100:
        assert stats.blocks_given_back >= 30
        assert stats.holes_filled >= (0 if backend == "lazy_compaction" else 5)
    assert replica.scheduler.num_preemptions == 0
    assert (replica.worker.probe.num_measured >= 24) == (policy == "h2o")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tokens_that_a_policy_cannot_judge_yet_are_counted(depth: int) -> None:
    """Equal requests: all hold the most they ever do at the same time."""
    vtoken = {"reclaim": "pressure", "low_water": 0, "headroom": 0}
    replica = Replica(Setting(depth=depth, num_blocks=34, stops=False, vtoken=vtoken))
    options = {"policy": "h2o", "budget_tokens": 40, "sinks": 0, "recent": 1}
    options |= {"evict_after_tokens": 0, "tick_tokens": 250}
    for i in range(12):
        replica.arrive(prompt(i, 250), 240, **options)
    replica.run_to_the_end()
    replica.check_clean()
    assert replica.scheduler.reclaimer.stats.blocks_given_back >= 12
    assert replica.scheduler.num_preemptions == 0


def run_chunks(num_blocks: int) -> int:
    """Preemptions of prompts that come in chunks of 3 blocks, two of them not measured yet."""
    vtoken = {"reclaim": "pressure", "low_water": 0, "headroom": 0, "min_chunk_tokens": 96}
    setting = Setting(depth=3, num_blocks=num_blocks, max_batched=512, stops=False, vtoken=vtoken)
    replica = Replica(setting)
    options = {"policy": "h2o", "budget_tokens": 100, "sinks": 0, "recent": 1, "tick_tokens": 4}
    for i in range(8):
        replica.arrive(prompt(i, 400), 40, **options, evict_after_tokens=0)
    replica.run_to_the_end()
    replica.check_clean()
    assert replica.counts["finished"] == 8
    return replica.scheduler.num_preemptions


@pytest.mark.parametrize("num_blocks", [26, 34])
def test_chunks_that_a_policy_cannot_judge_yet_are_counted(
    num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_chunks(num_blocks) == 0

    def of_one_chunk(*args: Any) -> Footprint:
        footprint = footprint_of(*args)
        slack = 3  # as long as outputs are in flight
        one = worst_blocks(footprint.live + slack, 1, footprint.chunk, BLOCK_SIZE)
        assert one < footprint.prefill
        return replace(footprint, prefill=one)

    monkeypatch.setattr("worker.admission.footprint_of", of_one_chunk)
    assert run_chunks(num_blocks) > 0, "a control"


@pytest.mark.parametrize("num_blocks", range(15, 22))
def test_a_row_that_becomes_shared_is_counted_before_it_does(make: Make, num_blocks: int) -> None:
    """The second request hits blocks that the first one can then reclaim no more."""
    vtoken = {"reclaim": "pressure", "low_water": 0, "headroom": 0}
    replica = make(num_blocks=num_blocks, vtoken=vtoken)
    options = {"policy": "streaming_llm", "budget_tokens": 64, "sinks": 0, "recent": 1}
    replica.arrive(prompt(0, 320), 150, **options, evict_after_tokens=0)
    step_until(replica, lambda: replica.counts["steps"] == 20)
    replica.arrive(prompt(0, 320), 150, **options, evict_after_tokens=0)
    replica.run_to_the_end()
    assert replica.scheduler.num_preemptions == 0


def test_an_admission_that_waits_is_served_in_place_in_the_next_step(make: Make) -> None:
    """No plan finds destinations, so lazy compaction gives nothing back."""
    replica = make(num_blocks=19, vtoken={"reclaim": "pressure", "low_water": 0})
    replica.arrive(prompt(0, 400), 100, **KEEP_HALF, tick_tokens=500)
    step_until(replica, lambda: replica.counts["steps"] == 20)
    replica.scheduler.reclaimer.planner.proposals = lambda blocked: []
    filled = replica.scheduler.reclaimer.stats.holes_filled
    replica.arrive(prompt(1, 150), 20)
    replica.schedule()
    assert len(replica.scheduler.waiting) == 1
    replica.schedule()
    assert not replica.scheduler.waiting
    assert replica.scheduler.reclaimer.stats.holes_filled == filled + 1


def test_a_hash_that_outlives_its_content_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: what is overwritten, or computed after a reclaim, must leave the prefix cache."""
    monkeypatch.setattr(PoolPort, "forget_hashes", lambda self, block_ids: None)
    with pytest.raises(ContentViolation):
        run_traffic(2, {"fillings": 3000})


def test_nobody_is_disturbed_for_an_admission_that_its_blocks_cannot_serve(make: Make) -> None:
    """What a request gives back below its cap stays promised to it."""
    replica = make(num_blocks=40, vtoken={"low_water": 0, "headroom": 0})
    options = {"policy": "random", "budget_tokens": 128, "sinks": 0, "recent": 1}
    for i in range(8):
        replica.arrive(prompt(i, 96), 350, **options, evict_after_tokens=0)
    step_until(replica, lambda: replica.counts["steps"] == 60)
    running, stats = len(replica.scheduler.running), replica.scheduler.reclaimer.stats
    assert 5 <= running < 8 and replica.scheduler.waiting
    for _ in range(250):
        replica.schedule()
    assert len(replica.scheduler.running) == running
    assert stats.plans_committed >= 10 > stats.holes_filled
    replica.run_to_the_end()
    replica.check_clean()


def test_quick_bounds_decide_as_counting_exactly_does(monkeypatch: pytest.MonkeyPatch) -> None:
    quick, seen = Admission._or_wait, Counter[str]()

    def both(self: Admission, new: Demand) -> int | None:
        free, options = self.scheduler.reclaimer.port.num_free(), self.scheduler.replica_options
        headroom = headroom_blocks(self.scheduler.reclaimer.port.num_blocks(), options.headroom)
        exactly = required_blocks(new, self._owed(), headroom)
        answer = quick(self, new)
        if answer is not None:
            assert (answer > free) == (exactly > free)
            assert self.wanted in (0, exactly)
            seen["must wait" if exactly > free else "may come"] += 1
        return answer

    monkeypatch.setattr(Admission, "_or_wait", both)
    run_traffic(2, {"fillings": 500, "must wait": 200, "may come": 200}, totals=seen)
