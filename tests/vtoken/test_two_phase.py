"""When the votes of all ranks decide a plan, and how."""

from typing import Any

import pytest

from harness.tables import make_plan, make_request
from vtoken.plan import RelocationPlan, StepReport, Vote
from vtoken.two_phase import TwoPhase, Verdict


def open_plan(num_ranks: int = 2) -> tuple[TwoPhase, RelocationPlan]:
    plan = make_plan(make_request(15, dead=range(5, 11)), sources=[1, 2], destinations=[77])
    two_phase = TwoPhase(num_ranks)
    two_phase.open(plan)
    return two_phase, plan


def vote(plan: RelocationPlan, rank: int, **changes: Any) -> StepReport:
    fields = {"digest": plan.digest, "ok": True, "copied": True, **changes}
    return StepReport((Vote(plan.plan_id, rank, **fields),))


def verdict(two_phase: TwoPhase) -> Verdict | None:
    return next(two_phase.verdicts(), None)


def test_every_rank_must_have_copied() -> None:
    two_phase, plan = open_plan()
    assert verdict(two_phase) is None
    two_phase.record(vote(plan, 0))
    assert verdict(two_phase) is None
    two_phase.record(vote(plan, 1, copied=False))
    assert verdict(two_phase) is None, "prepared is not enough"
    two_phase.record(vote(plan, 1))
    assert verdict(two_phase) == Verdict(plan, None)


def test_one_refusal_aborts_at_once_and_says_why() -> None:
    two_phase, plan = open_plan()
    two_phase.record(vote(plan, 1, ok=False, copied=False, digest=0, reason="no row"))
    assert verdict(two_phase) == Verdict(plan, "refused", "rank 1: no row")


@pytest.mark.parametrize("copied", [True, False])
def test_another_digest_aborts_at_once(copied: bool) -> None:
    two_phase, plan = open_plan()
    two_phase.record(vote(plan, 0, digest=plan.digest ^ 1, copied=copied))
    found = verdict(two_phase)
    assert found is not None and found.reason == "diverged"


def test_a_copy_that_went_wrong_takes_back_the_rank_s_yes() -> None:
    two_phase, plan = open_plan(num_ranks=1)
    two_phase.record(vote(plan, 0, copied=False))
    two_phase.record(vote(plan, 0, ok=False, copied=False, reason="I1: 1 moved tokens differ"))
    found = verdict(two_phase)
    assert found is not None and found.reason == "refused"


def test_votes_on_closed_and_unknown_plans_change_nothing() -> None:
    two_phase, plan = open_plan(num_ranks=1)
    two_phase.close(plan.plan_id)
    two_phase.record(vote(plan, 0))
    two_phase.record(StepReport((Vote(99, 0, 0, False, False),)))
    assert verdict(two_phase) is None and not two_phase.open_plans


def test_one_rank_cannot_vote_for_another() -> None:
    two_phase, plan = open_plan()
    two_phase.record(vote(plan, 0))
    two_phase.record(vote(plan, 0))
    assert verdict(two_phase) is None


def test_plans_may_be_closed_while_their_verdicts_are_read() -> None:
    two_phase, plan = open_plan(num_ranks=1)
    other = make_plan(make_request(15, dead=range(5, 11)), [1, 2], [78], plan_id=2)
    two_phase.open(other)
    for each in (plan, other):
        two_phase.record(vote(each, 0))
    assert len(two_phase.open_plans) == 2
    for found in two_phase.verdicts():
        two_phase.close(found.plan.plan_id)
    assert not two_phase.open_plans
