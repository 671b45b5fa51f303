"""What goes wrong between scheduler and shard, and what may be hit in the prefix cache."""

from collections.abc import Callable

import pytest

from harness.oracle import ContentViolation
from harness.replica import BLOCK_SIZE, Replica, prompt
from harness.scenes import KEEP_HALF, LONG_CHUNKS, aborts, open_plan, step_until, with_open_plan
from vtoken.errors import InvariantError
from vtoken.policy_runs import MAX_REFUSALS

Make = Callable[..., Replica]


def test_a_damaged_copy_is_aborted_and_no_row_changes(make: Make) -> None:
    replica = make()
    plan = with_open_plan(replica)
    row = list(replica.worker.rows["r1"])
    replica.worker.engine.corrupts = True
    step_until(replica, lambda: open_plan(replica) is not plan)
    replica.worker.engine.corrupts = False
    assert aborts(replica) == {"refused": 1}
    assert replica.worker.rows["r1"][: len(row)] == row


def test_copies_that_fail_again_and_again_end_their_request_alone(make: Make) -> None:
    replica = make(num_blocks=40)
    with_open_plan(replica)
    replica.arrive(prompt(1, 100), 160)
    replica.worker.engine.corrupts = True
    step_until(replica, lambda: "r1" not in replica.scheduler.requests)
    assert aborts(replica) == {"refused": MAX_REFUSALS}
    assert list(replica.scheduler.requests) == ["r2"]
    assert not replica.scheduler.reclaimer.two_phase.open_plans


def test_a_shard_with_another_table_is_found_out_before_any_row_changes(make: Make) -> None:
    replica = make()
    replica.arrive(prompt(0, 260), 160, **KEEP_HALF)
    step_until(replica, lambda: replica.scheduler.reclaimer.stats.plans_committed)
    table = replica.worker.shard.tables["r1"]
    table._positions[[0, 1]] = table._positions[[1, 0]]
    step_until(replica, lambda: aborts(replica))
    assert aborts(replica) == {"diverged": 1}


def test_measurements_that_fail_again_and_again_end_their_request_alone(make: Make) -> None:
    replica = make(num_blocks=40)
    replica.arrive(prompt(0, 260), 160, **(KEEP_HALF | {"policy": "h2o", "tick_tokens": 1}))
    replica.arrive(prompt(1, 260), 160, **KEEP_HALF)
    step_until(replica, lambda: "r1" in replica.worker.shard.incarnations)
    replica.worker.shard.incarnations["r1"] += 1
    step_until(replica, lambda: "r1" not in replica.scheduler.requests)
    assert list(replica.scheduler.requests) == ["r2"]
    assert replica.scheduler.reclaimer.stats.policies_disabled == 0


def test_a_request_that_has_not_grown_is_not_measured_again(make: Make) -> None:
    """A prompt may wait for its next chunk for many steps."""
    replica = make(num_blocks=40)
    replica.arrive(prompt(0, 260), 160, **(KEEP_HALF | {"policy": "h2o"}))
    replica.schedule()
    reclaimer = replica.scheduler.reclaimer
    request, runs = reclaimer.requests["r1"], reclaimer.policy_runs
    assert request.asked_at > 0 and request.is_due(request.asked_at)
    runs._visit(request, request.asked_at, 2)
    assert runs.take_probes() == ()
    request.asked_at = -1
    runs._visit(request, replica.scheduler._length_of("r1"), 2)
    assert len(runs.take_probes()) == 1, "a control"


def test_a_worker_without_a_probe_is_an_error(make: Make) -> None:
    replica = make(num_blocks=40)
    replica.worker.shard.probe = None
    replica.healthy = False
    replica.arrive(prompt(0, 260), 160, **(KEEP_HALF | {"policy": "h2o"}))
    with pytest.raises(InvariantError, match="has no score probe"):
        replica.schedule()


def test_a_lost_report_keeps_a_plan_open_until_its_request_ends(make: Make) -> None:
    replica = make()
    plan = with_open_plan(replica)
    answer = replica.in_flight[-1][1]
    answer.vtoken = type(answer.vtoken)()
    replica.worker.shard._copying.clear()
    for _ in range(10):
        replica.schedule()
    assert open_plan(replica) is plan


def test_a_worker_without_hooks_is_an_error(make: Make) -> None:
    replica = make()
    with_open_plan(replica)
    del replica.in_flight[-1][1].vtoken
    replica.healthy = False
    with pytest.raises(InvariantError, match="hooks do not run"):
        while replica.in_flight:
            replica.process()


def test_a_finished_conversation_is_never_hit_beyond_its_first_reclaim(make: Make) -> None:
    replica = make(num_blocks=60)
    replica.arrive(prompt(0, 100), 150, **KEEP_HALF)
    replica.run_to_the_end()
    committed = replica.scheduler.reclaimer.stats.plans_committed
    (text,) = replica.finished
    assert committed >= 1 and len(text) >= 5 * BLOCK_SIZE
    replica.arrive([*text, 1, 2, 3], 4, policy="keep_all")
    replica.schedule()
    (new,) = replica.in_flight[-1][0].scheduled_new_reqs
    assert 0 < new.num_computed_tokens < len(text) // BLOCK_SIZE * BLOCK_SIZE


def test_a_hash_published_after_a_reclaim_is_seen(make: Make) -> None:
    """The control of the test above: its content check fails when vLLM's own rule is used."""
    replica = make(num_blocks=60)
    manager = replica.scheduler.block_manager
    manager.cache_blocks = super(type(manager), manager).cache_blocks
    replica.healthy = False
    with pytest.raises(ContentViolation):
        for _ in range(2):
            replica.arrive(prompt(0, 500), 4, **LONG_CHUNKS)
            replica.run_to_the_end()


@pytest.mark.parametrize("caching", [True, False])
def test_a_long_answer_needs_no_more_blocks_than_it_holds(make: Make, caching: bool) -> None:
    """Without prefix caching vLLM counts no cached blocks: its own rule asked for the blocks that
    had left the row again and again, preempted the request, and it never got any further."""
    replica = make(num_blocks=10, caching=caching, vtoken={"backend": "lazy_compaction"})
    options = {"policy": "streaming_llm", "budget_tokens": 64, "evict_after_tokens": 0}
    replica.arrive(prompt(0, 96), 400, **options)
    replica.run_to_the_end(max_steps=600)
    assert replica.scheduler.num_preemptions == 0
    assert replica.scheduler.reclaimer.stats.blocks_given_back >= 10
