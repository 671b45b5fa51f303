# SPDX-License-Identifier: Apache-2.0
"""What a shard does around each forward, on every device, and how its votes travel up: as an
attribute of the step's output."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vtoken.plan import NO_ORDERS, StepOrders, StepReport, Vote
from vtoken.shard import Shard, Splice
from vtoken.signals import Observation


def orders_of(scheduler_output: SchedulerOutput) -> StepOrders:
    return getattr(scheduler_output, "vtoken", NO_ORDERS)


def before_forward(
    shard: Shard, scheduler_output: SchedulerOutput, splice: Callable[[Splice], None]
) -> None:
    """Everything that must be ordered before the forward and before vLLM's own row updates.

    Args:
        splice: changes the runner's row of a request.
    """
    orders = orders_of(scheduler_output)
    for change in shard.settle(orders):
        splice(change)
    for change in shard.fill(orders.fillings):
        splice(change)
    for request_id in scheduler_output.finished_req_ids:
        shard.stop(request_id)
    for request_id in scheduler_output.preempted_req_ids or ():
        shard.stop(request_id)
    for request_id, incarnation in orders.started.items():
        shard.start(request_id, incarnation)


@dataclass(frozen=True)
class PendingReport:
    """What a step has to say; its measurements may still be under way on the device."""

    votes: list[Vote]
    observe: Callable[[], list[Observation]]

    def resolve(self) -> StepReport:
        # The last vote of each plan: where a copy ends with the forward, PREPARED is in COPIED.
        last = {vote.plan_id: vote for vote in self.votes}
        return StepReport(tuple(last.values()), tuple(self.observe()))


def after_forward(shard: Shard, scheduler_output: SchedulerOutput) -> PendingReport | None:
    """Measure, start the copies, whose sources the forward may have written, and vote."""
    orders = orders_of(scheduler_output)
    observe = shard.observe(orders.probes)
    votes = shard.prepare(orders.prepares) + shard.copied()
    return PendingReport(votes, observe) if votes or orders.probes else None


class ReportingOutput(AsyncModelRunnerOutput):
    """An async output that carries the shard's report once it resolves."""

    def __init__(self, inner: AsyncModelRunnerOutput, report: PendingReport) -> None:
        self.inner = inner
        self.report = report

    def get_output(self) -> ModelRunnerOutput:
        output = self.inner.get_output()
        output.vtoken = self.report.resolve()
        return output


def attach(output: Any, report: PendingReport | None) -> Any:
    if report is None:
        return output
    if isinstance(output, AsyncModelRunnerOutput):
        return ReportingOutput(output, report)
    output = copy(output)  # a step without tokens answers with a singleton shared by all
    output.vtoken = report.resolve()
    return output
