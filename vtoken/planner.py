# SPDX-License-Identifier: Apache-2.0
"""When to reclaim and from whom: stages 1-3 up to the choice of blocks (paper section 3.3)."""

from collections.abc import Iterable

from vtoken.backends import BACKENDS, Backend, Draft, Limits, whole_blocks
from vtoken.options import ReplicaOptions
from vtoken.ports import BlockPort
from vtoken.request import EvictingRequest

# Drafts per step: the planner's checks are spread over steps (paper section 3.3, stage 1). So many
# times ``batch_blocks`` are the sources of all plans of a step together.
MAX_DRAFTS = 16
NO_LIMIT = 2**31 - 1
# ``adaptive`` weighs tokens read in vain against a plan: its moves, each a read and a write, and
# what it costs whatever it moves (about 0.1 ms of an 8B model's forward on an H200).
MOVE_COST, PLAN_COST = 2, 4096


class Planner:
    """Remembers which requests are worth a draft, and drafts."""

    def __init__(self, options: ReplicaOptions, block_size: int, port: BlockPort) -> None:
        self.options = options
        self.block_size = block_size
        self.port = port
        self.backend = BACKENDS[options.backend]
        self.in_place = options.backend == "hole_filling"
        self._copies = options.backend == "lazy_compaction"
        self.draining = False
        self._short = False
        self._last_free = port.num_free()
        self._drain = 0.0  # blocks that the pool lost in a step; forgotten by halves
        # Requests with dead tokens that no failed draft has seen yet (ordered sets) ...
        self._dirty: dict[str, EvictingRequest] = {}
        # ... and those of them that are worth it when blocks are not short, as of their last tick.
        self._wasteful: dict[str, EvictingRequest] = {}

    def note(self, request: EvictingRequest) -> None:
        """The request's dead tokens or its row changed: it is worth a draft again."""
        table = request.table
        request.count_reads()
        if table.num_live < table.resident and not request.is_over:
            self._dirty[request.request_id] = request
            if self._may_pay(request) or (self._copies and table.has_dead_block):
                self._wasteful[request.request_id] = request

    def forget(self, request_id: str) -> None:
        self._dirty.pop(request_id, None)
        self._wasteful.pop(request_id, None)

    def drain(self, requests: Iterable[EvictingRequest]) -> None:
        """From now on plan everything with a gain, until ``draining`` is False again."""
        self.draining = True
        self._dirty.update((r.request_id, r) for r in requests if not r.is_over)

    def settle(self, num_open_plans: int) -> None:
        """End a drain once nothing has a gain and no plan is open."""
        if self.draining and not self._dirty and not num_open_plans:
            self.draining = False

    def proposals(self, blocked: bool) -> list[tuple[EvictingRequest, Draft]]:
        """Drafts to carry out now, best gain per moved token first; destinations are free.

        Args:
            blocked: an admission or an allocation waits for blocks.
        """
        candidates = [] if self.in_place else self.candidates(blocked)
        if not candidates:
            return []
        # Running requests keep the blocks they are about to need.
        available = max(0, self.port.num_free() - self.port.growth())
        # A request in which much dies at once gets what others do not need of this step.
        sources = self.options.batch_blocks * MAX_DRAFTS // len(candidates)
        limits = Limits(NO_LIMIT if self.draining else sources, available)
        drafts = [(r, d) for r in candidates if (d := self._draft(r, limits))]
        drafts.sort(key=lambda item: -_gain_per_move(item[1], self.block_size))
        chosen = []
        for request, draft in drafts:
            if draft.num_destinations <= available:
                available -= draft.num_destinations
                if draft.num_destinations:
                    request.forget_reads()
                self.forget(request.request_id)
                chosen.append((request, draft))
            else:
                self._requeue(request)
        return chosen

    def reclaimable(self, requests: Iterable[EvictingRequest]) -> int:
        """Blocks that plans without limits would give back now."""
        everything = Limits(NO_LIMIT, NO_LIMIT)
        drafts = (self._try(self.backend, request, everything) for request in requests)
        return sum(draft.gain for draft in drafts if draft is not None)

    def candidates(self, blocked: bool) -> list[EvictingRequest]:
        """Requests to draft for in this step, none of them with an open plan."""
        free, last = self.port.num_free(), self._last_free
        self._last_free = free
        # A burst is expected to fade by halves, so to take as much again until a plan opened now
        # gives its blocks back.
        self._drain = max(last - free, self._drain / 2)
        if not self._dirty:
            return []
        low_water = self.options.low_water * self.port.num_blocks()
        ahead = free - self._drain
        self._short = blocked or ahead <= low_water
        if self.draining:
            return [r for r in self._dirty.values() if r.open_plan is None]
        if self._short:
            chosen = self._dirty
        elif self.options.reclaim != "pressure" or ahead <= 2 * low_water:
            chosen = self._wasteful
        else:
            return []
        return [r for r in list(chosen.values())[:MAX_DRAFTS] if r.open_plan is None]

    def _draft(self, request: EvictingRequest, limits: Limits) -> Draft | None:
        forced = self._short or self.draining
        if not forced and not self._may_pay(request):
            return self._free_of_charge(request, limits)
        draft = self._try(self.backend, request, limits)
        if draft is not None and not forced and not self._pays(request, draft):
            return self._free_of_charge(request, limits)
        if draft is None:
            if self._try(self.backend, request, Limits(limits.max_sources, NO_LIMIT)):
                self._requeue(request)  # only destinations are missing: try again next step
            else:
                self.forget(request.request_id)
        return draft

    def _free_of_charge(self, request: EvictingRequest, limits: Limits) -> Draft | None:
        """What can be given back without a copy. If nothing, it is looked at again after a tick."""
        draft = self._try(whole_blocks, request, limits) if self._copies else None
        if draft is None:
            self._wasteful.pop(request.request_id, None)
        return draft

    def _try(self, backend: Backend, request: EvictingRequest, limits: Limits) -> Draft | None:
        table, request_id = request.table, request.request_id
        new_blocks = self.port.row_from(request_id, len(table.block_ids))
        table.sync_new_tokens(new_blocks, self.port.length(request_id))
        movable = self.port.private(request_id)
        movable[max(table.tail, 0) :] = False
        return backend(table.block_live, movable, self.block_size, limits)

    def _may_pay(self, request: EvictingRequest) -> bool:
        """Whether a plan that copies can be worth it while blocks are not short."""
        if self.options.reclaim == "adaptive":
            return request.read_in_vain >= PLAN_COST
        return request.table.fragmentation > self.options.theta_f

    def _pays(self, request: EvictingRequest, draft: Draft) -> bool:
        """``adaptive`` copies once as much was read in vain as the copy costs, so that neither can
        outgrow the other, however fast tokens die (renting until one could have bought)."""
        if self.options.reclaim != "adaptive":
            return True
        num_moves = draft.num_destinations * self.block_size
        return request.read_in_vain >= MOVE_COST * num_moves + PLAN_COST

    def _requeue(self, request: EvictingRequest) -> None:
        """Move to the end, so that the next step's drafts start with others."""
        for queue in (self._dirty, self._wasteful):
            if queue.pop(request.request_id, None) is not None:
                queue[request.request_id] = request


def _gain_per_move(draft: Draft, block_size: int) -> float:
    return draft.gain / (1 + draft.num_destinations * block_size)
