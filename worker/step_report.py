# SPDX-License-Identifier: Apache-2.0
"""How a shard's votes travel up: as an attribute of the step's output."""

from copy import copy
from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vtoken.plan import StepReport, Vote


class ReportingOutput(AsyncModelRunnerOutput):
    """An async output that carries the shard's report once it resolves."""

    def __init__(self, inner: AsyncModelRunnerOutput, report: StepReport) -> None:
        self.inner = inner
        self.report = report

    def get_output(self) -> ModelRunnerOutput:
        output = self.inner.get_output()
        output.vtoken = self.report
        return output


def attach(output: Any, report: StepReport | None) -> Any:
    if report is None:
        return output
    if isinstance(output, AsyncModelRunnerOutput):
        return ReportingOutput(output, report)
    output = copy(output)  # a step without tokens answers with a singleton shared by all
    output.vtoken = report
    return output


def report_of(votes: list[Vote]) -> StepReport | None:
    """The last vote of each plan: where a copy ends with the forward, PREPARED is in COPIED."""
    return StepReport(tuple({vote.plan_id: vote for vote in votes}.values())) if votes else None
