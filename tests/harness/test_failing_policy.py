"""A policy that fails is switched off for its request, which goes on at full length."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from harness.replica import BLOCK_SIZE, Replica, prompt
from harness.scenes import KEEP_HALF, open_plan, step_until, with_open_plan
from vtoken.policies import POLICIES, StreamingLLM
from vtoken.policy import TokenView

Make = Callable[..., Replica]


class Raising:
    """One that a user might have written."""

    num_protected = 0
    signals = frozenset[str]()

    def score(self, view: TokenView) -> np.ndarray:
        raise KeyError("layer 7")


class Scribbling(Raising):
    def score(self, view: TokenView) -> np.ndarray:
        view.positions[:] = 0
        return view.positions.astype(np.float64)


class Unsure(Raising):
    def score(self, view: TokenView) -> np.ndarray:
        return np.full(view.positions.size, np.nan)


def break_policy(replica: Replica, request_id: str = "r1") -> None:
    replica.scheduler.reclaimer.requests[request_id].policy = Raising()


@pytest.fixture
def summaries(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """What the engine reports of each finished request."""
    found = {}
    free = Replica.__init__.__globals__["VTokenScheduler"]._free_request

    def watch(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        kv_params, ec_params = free(self, request, *args, **kwargs)
        found[request.request_id] = kv_params["vtoken"]
        return kv_params, ec_params

    monkeypatch.setattr("worker.scheduler.VTokenScheduler._free_request", watch)
    return found


def test_it_goes_on_to_its_end_and_says_so(make: Make, summaries: dict[str, Any]) -> None:
    replica = make(num_blocks=40)
    with_open_plan(replica)
    replica.arrive(prompt(1, 260), 160, **KEEP_HALF)
    break_policy(replica)
    step_until(replica, lambda: replica.scheduler.reclaimer.stats.policies_disabled)
    evicted = replica.scheduler.reclaimer.totals["r1"].tokens_evicted
    replica.run_to_the_end()
    assert replica.counts["finished"] == 2
    assert "KeyError('layer 7')" in summaries["r1"]["policy_error"]
    assert summaries["r1"]["tokens_evicted"] == evicted
    assert summaries["r2"]["policy_error"] == ""
    assert summaries["r2"]["tokens_evicted"] > evicted


def test_its_open_plan_is_carried_out(make: Make) -> None:
    """What has been decided stands; the policy is not asked again."""
    replica = make(num_blocks=40)
    with_open_plan(replica)
    break_policy(replica)
    step_until(replica, lambda: replica.scheduler.reclaimer.stats.policies_disabled, lag=9)
    step_until(replica, lambda: open_plan(replica) is None)
    assert replica.scheduler.reclaimer.stats.plans_committed >= 1
    replica.run_to_the_end()


def test_one_that_fails_while_a_plan_is_made_takes_no_block(make: Make) -> None:
    replica = make(vtoken={"reclaim": "pressure"}, num_blocks=40)
    replica.arrive(prompt(0, 260), 160, **(KEEP_HALF | {"keep_ratio": 0.6}))
    step_until(replica, lambda: replica.counts["steps"] == 20)
    assert open_plan(replica) is None
    break_policy(replica)
    replica.scheduler.reclaimer.reclaim_now()
    step_until(replica, lambda: replica.scheduler.reclaimer.stats.policies_disabled)
    held = len(replica.scheduler.block_manager.req_to_blocks["r1"])
    port = replica.scheduler.reclaimer.port
    assert port.num_free() == port.num_blocks() - held
    assert replica.scheduler.reclaimer.stats.plans_prepared == 0
    replica.run_to_the_end()
    assert replica.counts["finished"] == 1


def test_what_was_dead_when_it_failed_comes_back_before_anybody_is_preempted(make: Make) -> None:
    replica = make(num_blocks=21, vtoken={"reclaim": "pressure", "low_water": 0, "headroom": 0})
    options = KEEP_HALF | {"policy": "streaming_llm", "budget_tokens": 64}
    replica.arrive(prompt(0, 200), 300, **options)
    step_until(replica, lambda: replica.counts["steps"] == 140)
    break_policy(replica)
    step_until(replica, lambda: replica.scheduler.reclaimer.stats.policies_disabled)
    request, scheduler = replica.scheduler.reclaimer.requests["r1"], replica.scheduler
    resident = scheduler.requests["r1"].num_computed_tokens - request.table.shift
    assert resident - request.num_live(scheduler.requests["r1"].num_computed_tokens) > 200
    replica.arrive(prompt(1, 60), 300, policy="keep_all")
    replica.run_to_the_end()
    assert replica.counts["finished"] == 2
    assert scheduler.reclaimer.stats.blocks_given_back >= 200 // BLOCK_SIZE
    assert scheduler.num_preemptions == 0


def test_it_is_booked_at_full_length_and_is_the_first_to_be_preempted(
    make: Make, summaries: dict[str, Any]
) -> None:
    """Those admitted by their cap still find all that they were promised."""
    replica = make(num_blocks=26, vtoken={"headroom": 0})
    options = KEEP_HALF | {"policy": "streaming_llm", "budget_tokens": 64}
    for i in range(5):
        replica.arrive(prompt(i, 60), 400, **options)
    step_until(replica, lambda: len(replica.scheduler.running) == 5)
    break_policy(replica, "r2")
    step_until(replica, lambda: replica.scheduler.reclaimer.stats.policies_disabled)
    footprint = replica.scheduler.admission._footprints["r2"]
    shift = replica.scheduler.block_manager.shift.get("r2", 0)
    full = -(-460 // BLOCK_SIZE)
    assert footprint.cap(0, 0) == footprint.full == full - shift // BLOCK_SIZE
    replica.run_to_the_end()
    assert replica.counts["finished"] == 5
    preempted = {name for name, summary in summaries.items() if summary["preemptions"]}
    assert preempted == {"r2"}
    assert summaries["r2"]["policy_error"]
    assert summaries["r2"]["policy"] == "streaming_llm"


def test_one_that_writes_into_what_it_is_shown_is_switched_off(
    make: Make, summaries: dict[str, Any]
) -> None:
    replica = make(num_blocks=40)
    with_open_plan(replica)
    replica.scheduler.reclaimer.requests["r1"].policy = Scribbling()
    step_until(replica, lambda: replica.scheduler.reclaimer.stats.policies_disabled, lag=9)
    replica.run_to_the_end()
    assert "read-only" in summaries["r1"]["policy_error"]


def test_a_policy_is_made_once_for_each_request(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it may fail: at the request's arrival, which refuses it."""
    made: list[StreamingLLM] = []

    def factory(**knobs: Any) -> StreamingLLM:
        made.append(StreamingLLM(**knobs))
        return made[-1]

    monkeypatch.setitem(POLICIES, "fragile", factory)
    replica = make(num_blocks=40)
    replica.arrive(prompt(0, 260), 160, **(KEEP_HALF | {"policy": "fragile"}))
    step_until(replica, lambda: "r1" in replica.scheduler.reclaimer.requests)
    assert replica.scheduler.reclaimer.requests["r1"].policy is made[0]
    replica.run_to_the_end()
    assert len(made) == 1 and replica.counts["finished"] == 1


def test_scores_that_are_not_numbers_keep_their_tokens_and_are_counted(
    make: Make, summaries: dict[str, Any]
) -> None:
    replica = make(num_blocks=40)
    replica.arrive(prompt(0, 260), 60, **KEEP_HALF)
    step_until(replica, lambda: "r1" in replica.scheduler.reclaimer.requests)
    request = replica.scheduler.reclaimer.requests["r1"]
    request.policy = Unsure()
    evicted = request.totals.tokens_evicted
    replica.run_to_the_end()
    assert summaries["r1"]["tokens_evicted"] == evicted
    assert summaries["r1"]["scores_nan"] > 0 and summaries["r1"]["policy_error"] == ""
    assert replica.scheduler.reclaimer.stats.scores_nan == summaries["r1"]["scores_nan"]


def test_one_that_keeps_too_much_is_booked_at_full_length(make: Make) -> None:
    replica = make(num_blocks=40)
    replica.arrive(prompt(0, 260), 160, **KEEP_HALF)
    step_until(replica, lambda: "r1" in replica.scheduler.reclaimer.requests)
    replica.scheduler.reclaimer.requests["r1"].policy = Unsure()
    step_until(replica, lambda: replica.scheduler.booked_in_full)
    footprint = replica.scheduler.admission._footprints["r1"]
    assert footprint.decode == footprint.prefill == footprint.full
    replica.run_to_the_end()
    assert not replica.scheduler.booked_in_full


def test_a_finished_request_is_let_go_whatever_its_tick(make: Make) -> None:
    replica = make(num_blocks=60)
    for i in range(6):
        replica.arrive(prompt(i, 40), 5, **(KEEP_HALF | {"tick_tokens": 10**9}))
    replica.run_to_the_end()
    replica.arrive(prompt(7, 40), 100)  # steps go on
    replica.run_to_the_end()
    assert not any(replica.scheduler.reclaimer.policy_runs.ticks._due.values())


def with_a_broken_policy(replica: Replica) -> None:
    """r1 has given blocks back, and goes on without its policy."""
    with_open_plan(replica)
    step_until(replica, lambda: replica.scheduler.reclaimer.stats.plans_committed)
    break_policy(replica)
    step_until(replica, lambda: replica.scheduler.reclaimer.stats.policies_disabled)
    step_until(replica, lambda: open_plan(replica) is None)


def test_it_stays_off_when_its_request_begins_anew(make: Make, summaries: dict[str, Any]) -> None:
    """The policy of a new row would be made from the options, and work."""
    replica = make(num_blocks=40)
    with_a_broken_policy(replica)
    evicted = replica.scheduler.reclaimer.totals["r1"].tokens_evicted
    replica.reset(running=True)
    step_until(replica, lambda: replica.counts["resumed"])
    assert "r1" not in replica.scheduler.reclaimer.requests
    replica.run_to_the_end()
    assert summaries["r1"]["preemptions"] == 1
    assert summaries["r1"]["tokens_evicted"] == evicted
    assert "KeyError('layer 7')" in summaries["r1"]["policy_error"]
    assert replica.scheduler.reclaimer.stats.policies_disabled == 1


def test_a_preemption_books_again_what_had_been_given_back(make: Make) -> None:
    replica = make(num_blocks=40)
    with_a_broken_policy(replica)
    full = -(-(260 + 160) // BLOCK_SIZE)
    assert replica.scheduler.admission._footprints["r1"].full < full
    replica.reset(running=True)
    assert replica.scheduler.admission._footprints["r1"].full == full
    replica.run_to_the_end()
    assert replica.counts["finished"] == 1
