"""The corners of the protocol one by one, each on the real scheduler with a fake worker."""

from collections.abc import Callable
from typing import Any

import pytest

from harness.replica import Replica, prompt
from harness.scenes import (
    KEEP_HALF,
    aborts,
    last_orders,
    open_plan,
    ref_counts,
    step_until,
    with_open_plan,
)

Make = Callable[..., Replica]


@pytest.mark.parametrize(("depth", "steps"), [(1, 1), (2, 2), (3, 3)])
def test_commit_comes_with_the_first_output_after_the_report(
    make: Make, depth: int, steps: int
) -> None:
    replica = make(depth=depth)
    replica.arrive(prompt(0, 260), 160, **KEEP_HALF)
    replica.schedule()
    step_until(replica, lambda: open_plan(replica))
    prepared = replica.scheduler.current_step
    step_until(replica, lambda: replica.scheduler.reclaimer.stats.plans_committed)
    assert replica.scheduler.current_step == prepared + steps


def test_a_plan_is_not_committed_before_its_copy_has_ended(make: Make) -> None:
    replica = make()
    plan = with_open_plan(replica)
    for _ in range(20):
        replica.schedule(lag=9)
    assert open_plan(replica) is plan
    step_until(replica, lambda: open_plan(replica) is not plan)
    assert replica.scheduler.reclaimer.stats.plans_committed == 1


def test_sources_of_a_commit_serve_another_request_in_the_same_schedule(make: Make) -> None:
    replica = make(caching=False)
    plan = with_open_plan(replica)
    replica.schedule()
    while replica.in_flight:
        replica.process()
    replica.arrive(prompt(3, 60), 4)
    replica.schedule()
    assert last_orders(replica).commits == (plan.plan_id,)
    assert set(replica.worker.rows["r2"]) & set(plan.source_blocks.tolist())


def test_sharing_that_begins_after_prepare_aborts_a_plan_without_a_gain(make: Make) -> None:
    replica = make(num_blocks=40)
    plan = with_open_plan(replica)
    row = list(replica.worker.rows["r1"])
    replica.arrive(prompt(0, 260), 4, policy="keep_all")
    replica.schedule(lag=9)
    assert ref_counts(replica, plan.source_blocks).count(2) >= plan.gain
    step_until(replica, lambda: open_plan(replica) is not plan)
    assert aborts(replica) == {"shared": 1}
    assert replica.worker.rows["r1"][: len(row)] == row


def test_a_request_committed_and_preempted_in_one_schedule_begins_anew(make: Make) -> None:
    replica = make()
    plan = with_open_plan(replica)
    manager, stats = replica.scheduler.kv_cache_manager, replica.scheduler.reclaimer.stats
    allocate, refused = manager.allocate_slots, []

    def refuse_once_committed(*args: Any, **kwargs: Any) -> Any:
        if stats.plans_committed and not refused:
            return refused.append(True)
        return allocate(*args, **kwargs)

    manager.allocate_slots = refuse_once_committed
    step_until(replica, lambda: refused)
    assert last_orders(replica).commits == (plan.plan_id,)
    assert replica.scheduler.num_preemptions == 1
    step_until(replica, lambda: replica.counts["resumed"])
    assert replica.scheduler.reclaimer.requests["r1"].incarnation == plan.incarnation + 1
    assert replica.worker.shard.shift("r1") == 0


def test_a_client_abort_gives_destinations_back_at_once(make: Make) -> None:
    replica = make()
    plan = with_open_plan(replica)
    replica.abort("r1")
    assert ref_counts(replica, plan.destination_blocks) == [0] * plan.destination_blocks.size
    replica.schedule(lag=9)
    assert last_orders(replica).aborts == (plan.plan_id,)
    assert replica.counts["empty steps"] == 1, "carried by a step without tokens"
    assert aborts(replica) == {"aborted": 1}


def test_a_request_that_finishes_aborts_its_plan(make: Make) -> None:
    replica = make()
    replica.arrive(prompt(0, 260), 2, **(KEEP_HALF | {"keep_ratio": 0.25}))
    step_until(replica, lambda: not replica.scheduler.has_requests(), lag=9)
    assert aborts(replica) == {"finished": 1}


@pytest.mark.parametrize("depth", [2, 3])
def test_reset_with_running_requests_succeeds_while_a_plan_is_open(make: Make, depth: int) -> None:
    replica = make(depth=depth)
    with_open_plan(replica)
    assert not replica.scheduler.reset_prefix_cache()
    assert replica.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert aborts(replica) == {"preempted": 1}
    replica.schedule(lag=9)
    assert last_orders(replica).started == {"r1": 2}, "preempted and resumed in one step"


def test_another_request_under_the_same_id_gets_nothing_of_the_first(make: Make) -> None:
    replica = make()
    plan = with_open_plan(replica)
    replica.resubmit("r1", prompt(2, 200), 150, **KEEP_HALF)
    replica.schedule(lag=9)
    orders = last_orders(replica)
    assert orders.aborts == (plan.plan_id,) and orders.started == {"r1": plan.incarnation + 1}
    assert replica.in_flight[-1][0].finished_req_ids == {"r1"}
