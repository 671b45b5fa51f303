"""Short scripts that bring a replica into a state that a test wants to look at."""

from collections.abc import Callable, Sequence
from typing import Any

from harness.replica import Replica, prompt
from vtoken.plan import RelocationPlan, StepOrders

EAGER = {"reclaim": "eager", "theta_f": 0}
KEEP_HALF = {
    "policy": "random",
    "keep_ratio": 0.5,
    "sinks": 0,
    "recent": 1,
    "evict_after_tokens": 0,
}

# Two blocks a chunk.
LONG_CHUNKS = {**KEEP_HALF, "budget_tokens": 256, "keep_ratio": 1.0}


def open_plan(replica: Replica, request_id: str = "r1") -> RelocationPlan | None:
    return replica.scheduler.reclaimer.requests[request_id].open_plan


def step_until(replica: Replica, condition: Callable[[], Any], lag: int = 0) -> None:
    for _ in range(200):
        if condition():
            return
        replica.schedule(lag)
    raise AssertionError("never happened")


def with_open_plan(replica: Replica) -> RelocationPlan:
    """r1 with a plan that is open and whose copy is still running."""
    replica.arrive(prompt(0, 260), 160, **KEEP_HALF)
    step_until(replica, lambda: "r1" in replica.scheduler.reclaimer.requests, lag=9)
    step_until(replica, lambda: open_plan(replica), lag=9)
    plan = open_plan(replica)
    assert plan is not None
    return plan


def last_orders(replica: Replica) -> StepOrders:
    return replica.in_flight[-1][0].vtoken


def ref_counts(replica: Replica, block_ids: Sequence[int]) -> list[int]:
    return [replica.scheduler.block_manager.block_pool.blocks[i].ref_cnt for i in block_ids]


def aborts(replica: Replica) -> dict[str, int]:
    return dict(replica.scheduler.reclaimer.stats.plans_aborted)
