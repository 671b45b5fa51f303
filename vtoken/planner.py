# SPDX-License-Identifier: Apache-2.0
"""When to reclaim and from whom: stages 1-3 up to the choice of blocks (paper section 3.3)."""

from collections.abc import Iterable

from vtoken.backends import BACKENDS, Draft, Limits
from vtoken.options import ReplicaOptions
from vtoken.ports import BlockPort
from vtoken.request import EvictingRequest

# Drafts per step: the planner's checks are spread over steps (paper section 3.3, stage 1).
MAX_DRAFTS = 16
NO_LIMIT = 2**31 - 1


class Planner:
    """Remembers which requests are worth a draft, and drafts."""

    def __init__(self, options: ReplicaOptions, block_size: int, port: BlockPort) -> None:
        self.options = options
        self.block_size = block_size
        self.port = port
        self.backend = BACKENDS[options.backend]
        self.in_place = options.backend == "hole_filling"
        self.draining = False
        self._last_free = port.num_free()
        self._drain = 0.0  # blocks that the pool lost in a step; forgotten by halves
        # Requests with dead tokens that no failed draft has seen yet (ordered sets) ...
        self._dirty: dict[str, EvictingRequest] = {}
        # ... and those of them whose F was above theta_f at their last tick.
        self._wasteful: dict[str, EvictingRequest] = {}

    def note(self, request: EvictingRequest) -> None:
        """The request's dead tokens or its row changed: it is worth a draft again."""
        table = request.table
        if table.num_live < table.resident and not request.is_over:
            self._dirty[request.request_id] = request
            if table.fragmentation > self.options.theta_f:
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
        drafts = [(r, d) for r in candidates if (d := self._draft(r, available))]
        drafts.sort(key=lambda item: -_gain_per_move(item[1], self.block_size))
        chosen = []
        for request, draft in drafts:
            if draft.num_destinations <= available:
                available -= draft.num_destinations
                self.forget(request.request_id)
                chosen.append((request, draft))
            else:
                self._requeue(request)
        return chosen

    def reclaimable(self, requests: Iterable[EvictingRequest]) -> int:
        """Blocks that plans without limits would give back now."""
        drafts = (self._try(request, Limits(NO_LIMIT, NO_LIMIT)) for request in requests)
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
        if self.draining:
            return [r for r in self._dirty.values() if r.open_plan is None]
        if blocked or ahead <= low_water:
            chosen = self._dirty
        elif self.options.reclaim == "eager" or ahead <= 2 * low_water:
            chosen = self._wasteful
        else:
            return []
        return [r for r in list(chosen.values())[:MAX_DRAFTS] if r.open_plan is None]

    def _draft(self, request: EvictingRequest, available: int) -> Draft | None:
        sources = NO_LIMIT if self.draining else self.options.batch_blocks
        draft = self._try(request, Limits(sources, available))
        if draft is None:
            if self._try(request, Limits(sources, NO_LIMIT)):
                self._requeue(request)  # only destinations are missing: try again next step
            else:
                self.forget(request.request_id)
        return draft

    def _try(self, request: EvictingRequest, limits: Limits) -> Draft | None:
        table, request_id = request.table, request.request_id
        new_blocks = self.port.row_from(request_id, len(table.block_ids))
        table.sync_new_tokens(new_blocks, self.port.length(request_id))
        movable = self.port.private(request_id)
        movable[max(table.tail, 0) :] = False
        return self.backend(table.block_live, movable, self.block_size, limits)

    def _requeue(self, request: EvictingRequest) -> None:
        """Move to the end, so that the next step's drafts start with others."""
        for queue in (self._dirty, self._wasteful):
            if queue.pop(request.request_id, None) is not None:
                queue[request.request_id] = request


def _gain_per_move(draft: Draft, block_size: int) -> float:
    return draft.gain / (1 + draft.num_destinations * block_size)
