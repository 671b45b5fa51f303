# SPDX-License-Identifier: Apache-2.0
"""The open plans of a replica and what its shards have said about them.

A plan is opened by PREPARE and closed by COMMIT or ABORT. COMMIT needs COPIED from every rank:
a vote before the copy alone could neither catch a failed copy nor keep the wait at COMMIT free.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from vtoken.plan import RelocationPlan, StepReport, Vote


@dataclass
class OpenPlan:
    plan: RelocationPlan
    votes: dict[int, Vote] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """``reason`` is None for COMMIT, else why the plan is aborted."""

    plan: RelocationPlan
    reason: str | None
    detail: str = ""


class TwoPhase:
    """Opens plans, collects votes, and says which plans are decided."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.open_plans: dict[int, OpenPlan] = {}

    def open(self, plan: RelocationPlan) -> None:
        self.open_plans[plan.plan_id] = OpenPlan(plan)

    def close(self, plan_id: int) -> None:
        del self.open_plans[plan_id]

    def record(self, report: StepReport) -> None:
        """Take one rank's votes. Votes on closed plans are late answers and change nothing."""
        for vote in report.votes:
            if vote.plan_id in self.open_plans:
                self.open_plans[vote.plan_id].votes[vote.rank] = vote

    def gain(self) -> int:
        """Blocks that the open plans will give back if all are committed."""
        return sum(o.plan.gain for o in self.open_plans.values())

    def verdicts(self) -> Iterator[Verdict]:
        """Every plan that can be closed now. Safe to close plans while iterating."""
        for open_plan in list(self.open_plans.values()):
            plan, votes = open_plan.plan, open_plan.votes.values()
            refused = next((vote for vote in votes if not vote.ok), None)
            if refused is not None:
                yield Verdict(plan, "refused", f"rank {refused.rank}: {refused.reason}")
            elif any(vote.digest != plan.digest for vote in votes):
                yield Verdict(plan, "diverged", "a rank's digest differs from the plan's")
            elif len(votes) == self.num_ranks and all(vote.copied for vote in votes):
                yield Verdict(plan, None)
