# SPDX-License-Identifier: Apache-2.0
"""When to reclaim and from whom: stages 1-3 up to the choice of blocks (paper section 3.3)."""

import heapq
from collections.abc import Iterable
from itertools import islice

import numpy as np
import numpy.typing as npt

from vtoken.backends import BACKENDS, Backend, Draft, Limits, whole_blocks
from vtoken.options import ReplicaOptions
from vtoken.ports import BlockPort
from vtoken.request import EvictingRequest

Mask = npt.NDArray[np.bool_]

# Drafts per step: the planner's checks are spread over steps (paper section 3.3, stage 1). So many
# times ``batch_blocks`` are the sources of all plans of a step together.
MAX_DRAFTS = 16
NO_LIMIT = 2**31 - 1
EVERYTHING = Limits(NO_LIMIT, NO_LIMIT)
# ``adaptive`` weighs tokens read in vain against a plan: its moves, each a read and a write, and
# what it costs whatever it moves (about 0.1 ms of an 8B model's forward on an H200).
MOVE_COST, PLAN_COST = 2, 4096


class Planner:
    """Remembers which requests are worth a draft, and drafts.

    Attributes:
        step: the engine's current step.
    """

    def __init__(self, options: ReplicaOptions, block_size: int, port: BlockPort) -> None:
        self.options = options
        self.block_size = block_size
        self.port = port
        self.backend = BACKENDS[options.backend]
        self.in_place = options.backend == "hole_filling"
        self.step = 0
        self._copies = options.backend == "lazy_compaction"
        self._adapts = options.reclaim == "adaptive"
        self._short = False
        self._last_free = port.num_free()
        self._drain = 0.0  # blocks that the pool lost in a step; forgotten by halves
        # Requests with dead tokens that no failed draft has seen yet (ordered sets) ...
        self._dirty: dict[str, EvictingRequest] = {}
        # ... those of them that are worth it when blocks are not short ...
        self._wasteful: dict[str, EvictingRequest] = {}
        # ... and when others of them will be: a heap of (step, request id).
        self._later: list[tuple[int, str]] = []
        # Requests that give back all they can, until a draft finds nothing more in them.
        self._drained: dict[str, EvictingRequest] = {}

    @property
    def draining(self) -> bool:
        return bool(self._drained)

    def note(self, request: EvictingRequest) -> None:
        """The request's dead tokens or its row changed: it is worth a draft again."""
        request.count_reads()
        if not request.num_dead or request.is_over:
            return
        self._dirty[request.request_id] = request
        if self._copies and request.table.has_dead_block:
            self._wasteful[request.request_id] = request
        elif self._adapts:
            self._wait_for_reads(request, PLAN_COST)
        elif self._exceeds_theta(request):
            self._wasteful[request.request_id] = request

    def forget(self, request_id: str) -> None:
        """It has nothing to give until the next note."""
        self._set_aside(request_id)
        self._drained.pop(request_id, None)

    def drain(self, requests: Iterable[EvictingRequest]) -> None:
        """Plan everything in these requests that has a gain; ``draining`` until that is done."""
        self._drained.update((r.request_id, r) for r in requests if not r.is_over)

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
        drafts = [(r, d) for r in candidates if (d := self._draft(r, Limits(sources, available)))]
        drafts.sort(key=lambda item: -_gain_per_move(item[1], self.block_size))
        chosen = []
        for request, draft in drafts:
            if draft.num_destinations <= available:
                available -= draft.num_destinations
                if draft.num_destinations:
                    request.forget_reads()
                self._set_aside(request.request_id)
                chosen.append((request, draft))
            else:
                self._requeue(request)
        return chosen

    def reclaimable(self, requests: Iterable[EvictingRequest]) -> int:
        """Blocks that plans without limits would give back now."""
        drafts = (self._try(self.backend, r, self._look_at(r), EVERYTHING) for r in requests)
        return sum(draft.gain for draft in drafts if draft is not None)

    def candidates(self, blocked: bool) -> list[EvictingRequest]:
        """Requests to draft for in this step, none of them with an open plan."""
        free, last = self.port.num_free(), self._last_free
        self._last_free = free
        # A burst is expected to fade by halves, so to take as much again until a plan opened now
        # gives its blocks back.
        self._drain = max(last - free, self._drain / 2)
        if not (self._dirty or self._drained):
            return []
        low_water = self.options.low_water * self.port.num_blocks()
        ahead = free - self._drain
        self._short = blocked or ahead <= low_water
        chosen = [r for r in self._drained.values() if r.open_plan is None]
        if self._short:
            others = self._dirty
        elif self.options.reclaim != "pressure" or ahead <= 2 * low_water:
            others = self._worth_it()
        else:
            return chosen
        free_of_plans = (
            r for r in others.values() if r.open_plan is None and r.request_id not in self._drained
        )
        return chosen + list(islice(free_of_plans, MAX_DRAFTS))

    def _draft(self, request: EvictingRequest, limits: Limits) -> Draft | None:
        drained = request.request_id in self._drained
        if drained:
            limits = Limits(NO_LIMIT, limits.max_destinations)
        forced = self._short or drained
        movable = self._look_at(request)
        if not forced and not self._is_worth(request, PLAN_COST):
            return self._free_of_charge(request, movable, limits, PLAN_COST)
        draft = self._try(self.backend, request, movable, limits)
        if draft is None:
            more = Limits(limits.max_sources, NO_LIMIT)
            if self._try(self.backend, request, movable, more):
                self._requeue(request)  # only destinations are missing: try again next step
            else:
                self.forget(request.request_id)
            return None
        # ``adaptive`` copies once as much was read in vain as the copy costs, so that neither can
        # outgrow the other, however fast tokens die (renting until one could have bought).
        price = MOVE_COST * draft.num_destinations * self.block_size + PLAN_COST
        if not forced and not self._is_worth(request, price):
            return self._free_of_charge(request, movable, limits, price)
        return draft

    def _free_of_charge(
        self, request: EvictingRequest, movable: Mask, limits: Limits, price: int
    ) -> Draft | None:
        """What can be given back without a copy. If nothing, it is looked at again later."""
        draft = self._try(whole_blocks, request, movable, limits) if self._copies else None
        if draft is None:
            self._wasteful.pop(request.request_id, None)
            if self._adapts:
                self._wait_for_reads(request, price)
        return draft

    def _look_at(self, request: EvictingRequest) -> Mask:
        """Bring its table and its account up to date; the blocks of its row that may go."""
        table, request_id = request.table, request.request_id
        new_blocks = self.port.row_from(request_id, len(table.block_ids))
        table.sync_new_tokens(new_blocks, self.port.length(request_id))
        request.count_reads()
        movable = self.port.private(request_id)
        movable[max(table.tail, 0) :] = False
        return movable

    def _try(
        self, backend: Backend, request: EvictingRequest, movable: Mask, limits: Limits
    ) -> Draft | None:
        return backend(request.table.block_live, movable, self.block_size, limits)

    def _is_worth(self, request: EvictingRequest, price: int) -> bool:
        """Whether a plan that copies is worth its price while blocks are not short."""
        if self._adapts:
            return request.read_in_vain >= price
        return self._exceeds_theta(request)

    def _exceeds_theta(self, request: EvictingRequest) -> bool:
        return request.table.fragmentation > self.options.theta_f

    def _wait_for_reads(self, request: EvictingRequest, price: int) -> None:
        """Until attention has read so much in vain: all that is dead, at every step."""
        wait = max(0, -(-(price - request.read_in_vain) // request.num_dead))
        request.worth_at = self.step + wait
        heapq.heappush(self._later, (request.worth_at, request.request_id))

    def _worth_it(self) -> dict[str, EvictingRequest]:
        while self._later and self._later[0][0] <= self.step:
            step, request_id = heapq.heappop(self._later)
            request = self._dirty.get(request_id)
            if request is not None and request.worth_at == step:  # else it was noted again since
                self._wasteful[request_id] = request
        return self._wasteful

    def _set_aside(self, request_id: str) -> None:
        """No draft until the next note, unless it is being drained."""
        self._dirty.pop(request_id, None)
        self._wasteful.pop(request_id, None)

    def _requeue(self, request: EvictingRequest) -> None:
        """Move to the end, so that the next step's drafts start with others."""
        for queue in (self._dirty, self._wasteful):
            if queue.pop(request.request_id, None) is not None:
                queue[request.request_id] = request


def _gain_per_move(draft: Draft, block_size: int) -> float:
    return draft.gain / (1 + draft.num_destinations * block_size)
