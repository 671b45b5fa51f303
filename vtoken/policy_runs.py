# SPDX-License-Identifier: Apache-2.0
"""When policies run, and what they run on (paper section 3.3, stage 1).

A policy without signals runs in the step in which it is due. One with signals is measured in that
step and runs when the answer arrives, some steps later.
"""

import logging
from typing import TYPE_CHECKING

from vtoken.errors import PlanError, PolicyError
from vtoken.request import EvictingRequest
from vtoken.signals import Measure, Observation, Probe
from vtoken.ticks import TickQueue

if TYPE_CHECKING:
    from vtoken.reclaimer import Reclaimer

logger = logging.getLogger(__name__)

# An order can fail by accident; a third one of the same request in a row is no accident.
MAX_REFUSALS = 3
# A request is looked at again after so many steps at the latest: one that has ended is let go.
MAX_WAIT = 64


class PolicyRuns:
    """Runs the policies of one replica.

    Attributes:
        disabled: requests whose policy has failed, for the engine to go on with at full length.
        unbounded: requests that keep more than they should, for the engine to book in full.
    """

    def __init__(self, reclaimer: "Reclaimer") -> None:
        self.reclaimer = reclaimer
        self.port = reclaimer.port
        self.ticks = TickQueue()
        self.disabled: list[str] = []
        self.unbounded: list[str] = []
        self._probes: list[Probe] = []
        self._answered: list[EvictingRequest] = []

    def run_due(self, step: int) -> None:
        """Run what is due in this step, or have it measured."""
        for request in self._answered:
            if (length := self._length_of(request)) is not None:
                self.run(request, length)
        self._answered.clear()
        for request, length in self.ticks.take(step, self._length_of):
            self._visit(request, length, step)

    def run(self, request: EvictingRequest, length: int, short: bool = False) -> None:
        """Mark the policy's victims dead, or switch the policy off if it fails.

        Args:
            short: blocks are short: what can go must go.
        """
        new_blocks = self.port.row_from(request.request_id, len(request.table.block_ids))
        num_nan, exceeded = request.totals.scores_nan, request.exceeds_its_cap
        try:
            evicted = request.tick(new_blocks, length, short)
        except PolicyError as error:
            self.disable(request, error)
            return
        self.reclaimer.stats.scores_nan += request.totals.scores_nan - num_nan
        if request.exceeds_its_cap and not exceeded:
            self.unbounded.append(request.request_id)
        if evicted.size:
            self.reclaimer.audit.note(request, "evict", positions=evicted)
        self.reclaimer.planner.note(request)

    def disable(self, request: EvictingRequest, error: PolicyError) -> None:
        """Its policy does not work: it goes on without, its memory booked anew, and says so."""
        logger.error("request %s goes on without its policy: %s", request.request_id, error)
        request.switch_policy_off()
        request.totals.policy_error = str(error)
        self.reclaimer.stats.policies_disabled += 1
        self.disabled.append(request.request_id)
        self.reclaimer.planner.note(request)

    def take_probes(self) -> tuple[Probe, ...]:
        probes = tuple(self._probes)
        self._probes.clear()
        return probes

    def answer(self, observation: Observation) -> None:
        """A shard has measured. An answer about another incarnation comes too late."""
        probe = observation.probe
        request = self.reclaimer.requests.get(probe.request_id)
        if request is None or request.incarnation != probe.incarnation:
            return
        if not request.asks_policy:
            return
        if not observation.reason:
            request.failed_probes = 0
            request.signals.add(observation)
            self._answered.append(request)
            return
        logger.error("request %s was not measured: %s", probe.request_id, observation.reason)
        request.asked_at = -1
        request.failed_probes += 1
        if request.failed_probes == MAX_REFUSALS:
            message = f"{MAX_REFUSALS} measurements in a row have failed"
            self.reclaimer.fail(request, PlanError(message))

    def _visit(self, request: EvictingRequest, length: int, step: int) -> None:
        if request.is_due(length):
            if not request.measures:
                self.run(request, length)
            elif length != request.asked_at:  # a prefill may wait for its next chunk
                self._ask(request, length)
        if not request.asks_policy:
            return
        # A decoding request grows by at most one token a step; a prefill may end any time.
        wait = 1 if length < request.prefill_end else max(1, request.next_tick - length)
        self.ticks.add(request, step + min(wait, MAX_WAIT))

    def _ask(self, request: EvictingRequest, length: int) -> None:
        """Have a request measured in the step that is being decided."""
        table = request.table
        table.sync_new_tokens(self.port.row_from(request.request_id, len(table.block_ids)), length)
        request.asked_at = length
        request.next_tick = length + request.options.tick_tokens
        only_last = request.measures == (Measure.LAST_MASS,)
        window = 1 if only_last else self.reclaimer.options.probe_queries
        num_queries = min(window, length - request.first_computed)
        header = request.request_id, request.incarnation, table.epoch, length
        self._probes.append(Probe(*header, num_queries, request.measures))

    def _length_of(self, request: EvictingRequest) -> int | None:
        """None when this incarnation has ended, or its policy has."""
        runs = self.reclaimer.requests.get(request.request_id) is request and request.asks_policy
        return self.port.length(request.request_id) if runs else None
