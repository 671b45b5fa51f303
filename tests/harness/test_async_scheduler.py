"""The real scheduler, KV cache manager and block pool under arbitrary traffic, with several
outputs in flight: every forward sees its tokens and no others, and no block has a race."""

import pytest

from harness.fake_worker import Fault
from harness.oracle import ContentViolation
from harness.replica import Replica, Setting, prompt
from harness.streams import OrderViolation
from harness.traffic import run_traffic

# What must have happened for a run to count. Half of what one run shows, or less: what Hypothesis
# draws from a seed also depends on the constants in the modules that happen to be loaded.
ENOUGH = {
    "commits": 300,
    "fillings": 300,
    "measured": 1000,
    "plans hole_filling": 20,
    "plans preempted": 5,
    "plans finished": 20,
    "plans aborted": 3,
    "plans refused": 5,
    "plans shared": 1,
    "preemptions": 200,
    "resumed": 200,
    "resets": 50,
    "resubmissions": 50,
    "prefix hits": 50,
    "finished": 200,
    "empty steps": 50,
    "forwards checked": 10_000,
    "tokens not seen": 300_000,
}


@pytest.mark.parametrize("depth", [2, 3])
def test_every_forward_sees_exactly_its_tokens(depth: int) -> None:
    totals = run_traffic(depth, ENOUGH)
    assert totals["steps at full depth"] >= totals["steps"] / 2


def test_every_forward_sees_exactly_its_tokens_without_async_scheduling() -> None:
    run_traffic(1, {"commits": 50, "preemptions": 20, "prefix hits": 10})


def one_busy_hour(depth: int, fault: Fault | None) -> Replica:
    """Long prompts in chunks of one and of two blocks, late copies, aborts with plans open."""
    setting = Setting(
        depth=depth, num_blocks=24, stops=False, vtoken={"reclaim": "eager", "theta_f": 0}
    )
    replica = Replica(setting, fault)
    options = {"policy": "random", "sinks": 0, "recent": 1, "evict_after_tokens": 0}
    requests = replica.scheduler.reclaimer.requests
    for i in range(16):
        tokens = prompt(i % 4, 300 + 37 * i % 200)
        replica.arrive(tokens, 60, **options, budget_tokens=64 if i % 2 else 256)
        for _ in range(16):
            replica.schedule(lag=i % 3)
        if i % 3 == 2:
            for request in [r for r in requests.values() if r.open_plan]:
                replica.abort(request.request_id)
    return replica


@pytest.mark.parametrize("depth", [2, 3])
def test_a_busy_hour_without_a_fault_is_clean(depth: int) -> None:
    replica = one_busy_hour(depth, None)
    replica.run_to_the_end()
    replica.check_clean()
    stats = replica.scheduler.reclaimer.stats
    assert stats.plans_committed >= 10 and stats.plans_aborted.total() >= 3
    assert stats.holes_filled >= 10


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("fault", Fault)
def test_a_planted_wrong_order_is_seen(fault: Fault, depth: int) -> None:
    with pytest.raises((OrderViolation, ContentViolation)):
        one_busy_hour(depth, fault)
