# SPDX-License-Identifier: Apache-2.0
"""One evicting request in the engine scheduler: its token table, its policy, its counters."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vtoken.backends import Draft
from vtoken.options import EvictionOptions
from vtoken.plan import RelocationPlan, plan_digest
from vtoken.policies.keep_all import KeepAll
from vtoken.policy import TokenView, checked_scores, choose_victims, protected_mask
from vtoken.signals import SignalStore, measures_for
from vtoken.table import TokenTable

Int32s = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


@dataclass
class RequestTotals:
    """What eviction did to a request over all its incarnations. Reported in ``usage``.

    Attributes:
        scores_nan: times that a token was kept because its score was not a number.
        policy_error: why its policy was switched off; empty while it runs.
    """

    tokens_evicted: int = 0
    blocks_given_back: int = 0
    reclaims: int = 0
    scores_nan: int = 0
    policy_error: str = ""


class EvictingRequest:
    """State of one incarnation. A preempted request starts again as another incarnation.

    Attributes:
        first_computed: tokens before it came from the prefix cache: their queries are unknown.
        prefill_end: length at which the tokens known at the start are computed; until then
            the policy runs after every chunk.
        next_tick: length at which the policy runs next.
        filled_at: length at which holes were last looked for.
        refusals: plans in a row that a rank has refused or differed on.
        failed_probes: measurements in a row that a rank has refused.
        asked_at: length at which it was measured last.
        read_in_vain: dead tokens that attention has read since its last plan, summed over steps.
        worth_at: step in which a copy will be worth what was read in vain.
        exceeds_its_cap: scores that are no numbers have kept tokens that it should have given up.
        policy_is_off: its policy has failed: nothing more dies. What is dead is still reclaimed.
        is_over: no more policy, no more plans: it only waits for the engine to end it.
    """

    def __init__(
        self, request_id: str, incarnation: int, options: EvictionOptions, block_size: int
    ) -> None:
        self.request_id = request_id
        self.incarnation = incarnation
        self.options = options
        self.policy = options.scorer
        self.signals = SignalStore(self.policy.signals)
        self.measures = measures_for(self.policy.signals)
        self.num_prompt_tokens = 0
        self.first_computed = 0
        self.prefill_end = 0
        self.next_tick = 0
        self.filled_at = -1
        self.table = TokenTable(block_size)
        self.open_plan: RelocationPlan | None = None
        self.refusals = self.failed_probes = 0
        self.asked_at = -1
        self.read_in_vain = 0
        self.worth_at = -1
        self._counted_to = self._num_dead = 0
        self.exceeds_its_cap = self.policy_is_off = self.is_over = False
        self.totals = RequestTotals()

    @property
    def asks_policy(self) -> bool:
        return not (self.is_over or self.policy_is_off)

    def switch_policy_off(self) -> None:
        self.policy, self.policy_is_off = KeepAll(), True

    @property
    def awaits_signals(self) -> bool:
        """Whether its policy cannot judge all tokens known at the start yet."""
        return bool(self.measures) and self.signals.observed < self.prefill_end

    @property
    def num_dead(self) -> int:
        """Dead tokens that still have slots."""
        return self.table.resident - self.table.num_live

    def num_live(self, length: int) -> int:
        """Live tokens at ``length``: those that the table has not registered yet are live."""
        return self.table.num_live + length - self.table.length

    def count_reads(self) -> None:
        """Add what the steps since the last count have read of dead tokens. A step computes one
        token, or a chunk of a prefill."""
        table = self.table
        grown = table.length - self._counted_to
        steps = min(grown, 1) if table.length <= self.prefill_end else grown
        self.read_in_vain += steps * self._num_dead
        self._counted_to, self._num_dead = table.length, self.num_dead

    def forget_reads(self) -> None:
        """What was read in vain is paid for: what is dead now counts from here on."""
        self.count_reads()
        self.read_in_vain = 0

    def excess(self, length: int) -> int:
        """Live tokens that can go at ``length``, protection aside. What was never measured stays,
        so of a policy with signals this is what it gives when blocks are short."""
        if self.policy_is_off or length < self.options.evict_after_tokens:
            return 0
        live = self.num_live(length)
        wanted = live - self.options.live_target(length)
        if self.measures:
            wanted = min(wanted, live - (length - self.signals.observed))
        return max(0, wanted)

    def _excess_when_measured(self, length: int) -> int:
        """Live tokens that were too many when the request was measured: newer ones would make it
        give up more of the older ones than it ever meant to."""
        known = self.signals.observed
        if known < self.options.evict_after_tokens:
            return 0
        live = self.num_live(length) - (length - known)
        return max(0, live - self.options.live_target(known))

    def is_due(self, length: int) -> bool:
        return length >= self.next_tick or length <= self.prefill_end

    def tick(self, new_block_ids: Sequence[int], length: int, short: bool = False) -> Int32s:
        """Register new tokens, run the policy, mark its victims dead.

        Args:
            short: blocks are short: give up all that can go now.

        Returns:
            int32 ``[n]``, the text positions evicted by this call.

        Raises:
            PolicyError: the policy raised, or scored other tokens; nothing was evicted.
        """
        table, as_measured = self.table, bool(self.measures) and not short
        table.sync_new_tokens(new_block_ids, length)
        if not self.measures:  # else what matters is when it was measured last
            self.next_tick = length + self.options.tick_tokens
        num_victims = self._excess_when_measured(length) if as_measured else self.excess(length)
        if not num_victims:
            return table.positions[:0]
        live = np.flatnonzero(table.live)
        if self.measures:
            live = live[table.positions[live] < self.signals.observed]
        view = self._view(live, self.signals.observed if as_measured else length)
        protected = protected_mask(
            view, self.options.sinks, self.options.recent, self.options.protect_prompt
        )
        scores, unknown = checked_scores(self.policy, view)
        if num_unknown := int(unknown.sum()):
            protected |= unknown
            self.totals.scores_nan += num_unknown
        rows = choose_victims(view, scores, protected, num_victims)
        self.exceeds_its_cap |= bool(num_unknown) and rows.size < num_victims
        table.evict_indices(live[rows])
        self.totals.tokens_evicted += rows.size
        return view.positions[rows]

    def build_plan(self, draft: Draft, plan_id: int, destinations: Sequence[int]) -> RelocationPlan:
        """Fix a draft: its live tokens move, and the best-scored dead ones fill the last block."""
        table = self.table
        plan = RelocationPlan(
            plan_id=plan_id,
            request_id=self.request_id,
            incarnation=self.incarnation,
            epoch=table.epoch,
            length=table.length,
            block_size=table.block_size,
            source_indices=draft.source_indices,
            source_blocks=np.array([table.block_ids[i] for i in draft.source_indices], np.int32),
            kept=np.empty(0, np.bool_),
            fillers=np.empty(0, np.bool_),
            destination_blocks=np.array(destinations, np.int32),
            digest=0,
        )
        tokens = plan.source_tokens()
        kept = table.live[tokens]
        fillers = self._choose_fillers(tokens, kept, plan.num_moves - int(kept.sum()))
        plan = replace(plan, kept=kept, fillers=fillers)
        for array in (plan.source_indices, plan.source_blocks, kept, fillers):
            array.setflags(write=False)  # in-process, shards hold these very objects
        return replace(plan, digest=plan_digest(plan, table.positions[tokens[plan.selected]]))

    def _choose_fillers(self, tokens: npt.NDArray[np.int64], kept: Mask, count: int) -> Mask:
        fillers = np.zeros_like(kept)
        if count:
            dead = np.flatnonzero(~kept)
            view = self._view(tokens[dead], self.table.length)
            order = np.lexsort((view.positions, checked_scores(self.policy, view)[0]))
            fillers[dead[order[-count:]]] = True
        return fillers

    def _view(self, indices: npt.NDArray[np.int64], length: int) -> TokenView:
        """These tokens, as if the text ended at ``length``."""
        positions = self.table.positions[indices]
        budget = self.options.live_target(length)
        signals = self.signals.of(positions) if self.measures else {}
        positions.setflags(write=False)  # it is used again after the policy has seen it
        return TokenView(positions, length, self.num_prompt_tokens, budget, signals)
