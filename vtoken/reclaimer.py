# SPDX-License-Identifier: Apache-2.0
"""Reclamation in one replica: the only author of evictions, plans, commits and aborts.

begin_step   close open plans: COMMIT splices rows and frees sources, ABORT frees destinations
(the engine schedules; finish and preemption call ``drop``, which aborts; an allocation that finds
too few blocks calls ``make_room``)
end_step     run due policies, trigger, plan, take destinations -> the orders of this step
"""

import logging

from vtoken.audit import AuditTrail
from vtoken.backends import Draft
from vtoken.errors import PlanError, PolicyError, VTokenError
from vtoken.options import EvictionOptions, ReplicaOptions
from vtoken.plan import NO_ORDERS, RelocationPlan, StepOrders, StepReport
from vtoken.planner import Planner
from vtoken.policy_runs import MAX_REFUSALS, PolicyRuns
from vtoken.ports import BlockPort
from vtoken.request import EvictingRequest, RequestTotals
from vtoken.room import Room
from vtoken.stats import ReclaimStats
from vtoken.two_phase import TwoPhase

logger = logging.getLogger(__name__)


class Reclaimer:
    """Owns the token tables of the evicting requests and every open plan."""

    def __init__(
        self, options: ReplicaOptions, block_size: int, num_ranks: int, port: BlockPort
    ) -> None:
        self.options = options
        self.block_size = block_size
        self.port = port
        self.planner = Planner(options, block_size, port)
        self.two_phase = TwoPhase(num_ranks)
        self.audit = AuditTrail(options.audit_dir)
        self.stats = ReclaimStats()
        self.policy_runs = PolicyRuns(self)
        self.room = Room(self)
        self.requests: dict[str, EvictingRequest] = {}
        self.totals: dict[str, RequestTotals] = {}
        # Requests from which reclaiming fails, for the engine to end with an error.
        self.failed: list[str] = []
        self._step = 0
        self._next_plan_id = 0
        self._next_incarnation = 0
        self._started: dict[str, int] = {}
        self._commits: list[int] = []
        self._aborts: list[int] = []

    # -- life of a request ---------------------------------------------------------------------

    def start(
        self, request_id: str, options: EvictionOptions, num_prompt_tokens: int, span: range
    ) -> None:
        """A request's row begins anew, first time or resumed. Its shift is 0.

        Args:
            span: positions to compute before it decodes: those before came from the prefix cache.
        """
        self._next_incarnation += 1
        request = EvictingRequest(request_id, self._next_incarnation, options, self.block_size)
        request.num_prompt_tokens = num_prompt_tokens
        request.first_computed, request.prefill_end = span.start, span.stop
        request.totals = self.totals.setdefault(request_id, RequestTotals())
        self.requests[request_id] = request
        self._started[request_id] = request.incarnation
        self.policy_runs.ticks.add(request, self._step)
        self.audit.note(request, "start")

    def drop(self, request_id: str, cause: str) -> None:
        """A request loses its row: its open plan is aborted.

        Args:
            cause: finished, aborted or preempted; counted as the plan's abort reason.
        """
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        self.planner.forget(request_id)
        if request.open_plan is not None:
            self.abort(request, cause)
        self.audit.note(request, "drop")

    def forget(self, request_id: str) -> None:
        """A request is finished for good."""
        self.totals.pop(request_id, None)

    def report(self, report: StepReport) -> None:
        """Votes and measurements that arrived with a step's output."""
        self.two_phase.record(report)
        for observation in report.observations:
            self.policy_runs.answer(observation)

    # -- one step ------------------------------------------------------------------------------

    def begin_step(self, step: int, wanted: int = 0) -> None:
        """Close what can be closed. Runs before the engine schedules, so that freed blocks serve
        this very step and a splice precedes this step's own appends.

        Args:
            wanted: free blocks that the next admission waits for; 0 if none does.
        """
        self._step = self.audit.step = self.planner.step = step
        for verdict in self.two_phase.verdicts():
            plan = verdict.plan
            request = self.requests[plan.request_id]
            if verdict.reason is not None:
                self.abort(request, verdict.reason, verdict.detail)
            elif (gain := self._gain_now(plan)) < 1:
                self.abort(request, "shared")
            else:
                self._commit(plan, request, gain)
        dry = self.room.is_dry()
        if self.planner.in_place or (dry and self.planner.draining):
            for request in self.planner.candidates(wanted > 0):
                self.room.fill(request)
        elif dry:
            self.room.drip()
        if wanted:
            self.room.make_for_admission(wanted)

    def end_step(self, blocked: bool) -> StepOrders:
        """Run due policies, then plan.

        Args:
            blocked: an admission or an allocation waits for blocks.
        """
        self.policy_runs.run_due(self._step)
        drafts = [] if self.room.is_dry() else self.planner.proposals(blocked)
        plans = [self._prepare(request, draft) for request, draft in drafts]
        prepares = [plan for plan in plans if plan is not None]
        orders = StepOrders(
            self._started,
            tuple(self._commits),
            tuple(self._aborts),
            self.room.take_orders(),
            tuple(prepares),
            self.policy_runs.take_probes(),
        )
        if not orders:
            return NO_ORDERS
        self._started, self._commits, self._aborts = {}, [], []
        return orders

    def reclaim_now(self) -> None:
        """Run plans over the next steps until none has a gain in any request of now
        (``planner.draining``)."""
        self.planner.drain(self.requests.values())

    # -- life of a plan ------------------------------------------------------------------------

    def _prepare(self, request: EvictingRequest, draft: Draft) -> RelocationPlan | None:
        """None if the policy failed."""
        self._next_plan_id += 1
        destinations = self.port.take(draft.num_destinations)
        try:
            plan = request.build_plan(draft, self._next_plan_id, destinations)
        except PolicyError as error:
            self.port.give_back(destinations)
            self.policy_runs.disable(request, error)
            return None
        request.open_plan = plan
        self.two_phase.open(plan)
        self.stats.plans_prepared += 1
        return plan

    def fail(self, request: EvictingRequest, error: VTokenError) -> None:
        """Reclaiming from it does not work: the engine ends this request with an error."""
        logger.error("request %s fails: %s", request.request_id, error)
        request.is_over = True
        self.failed.append(request.request_id)
        self.planner.forget(request.request_id)

    def _gain_now(self, plan: RelocationPlan) -> int:
        """Blocks that a commit would give back now: a source may have become shared."""
        private = self.port.private(plan.request_id)[plan.source_indices]
        return int(private.sum()) - plan.destination_blocks.size

    def _commit(self, plan: RelocationPlan, request: EvictingRequest, gain: int) -> None:
        table, request_id = request.table, plan.request_id
        new_blocks = self.port.row_from(request_id, len(table.block_ids))
        table.sync_new_tokens(new_blocks, self.port.length(request_id))
        before = len(table.block_ids)
        tokens = plan.source_tokens()[~plan.selected]
        gone = table.positions[tokens] if self.audit.enabled else ()
        table.apply_moves(plan.source_indices, plan.selected, plan.destination_blocks.tolist())
        self.port.replace_row(request_id, table.block_ids, table.shift)
        # Highest index first: the hashes of a prefix chain stay useful from its head.
        self.port.give_back(plan.source_blocks[::-1].tolist())
        self._close(plan, request)
        request.refusals = 0
        if plan.num_moves:
            request.forget_reads()  # what was read while it was open no plan could have spared
        self.planner.note(request)
        self._commits.append(plan.plan_id)
        self.stats.commit(plan, gain)
        request.totals.blocks_given_back += gain
        request.totals.reclaims += 1
        self.audit.note(request, "reclaim", positions=gone, blocks_before=before)

    def abort(self, request: EvictingRequest, reason: str, detail: str = "") -> None:
        """Give up the open plan of a request. Its row stays, its destinations come back."""
        plan = request.open_plan
        assert plan is not None
        self.port.give_back(plan.destination_blocks[::-1].tolist())
        self._close(plan, request)
        self._aborts.append(plan.plan_id)
        self.stats.plans_aborted[reason] += 1
        if reason in ("refused", "diverged"):
            logger.error("plan %d of %s: %s", plan.plan_id, plan.request_id, detail)
            request.refusals += 1
            if request.refusals == MAX_REFUSALS:
                self.fail(request, PlanError(f"{MAX_REFUSALS} plans in a row have failed"))
        elif self.requests.get(plan.request_id) is request:
            self.planner.note(request)

    def _close(self, plan: RelocationPlan, request: EvictingRequest) -> None:
        self.two_phase.close(plan.plan_id)
        request.open_plan = None
