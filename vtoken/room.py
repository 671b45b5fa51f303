# SPDX-License-Identifier: Apache-2.0
"""Room at once: reclaiming in place when blocks are missing now (design: hole filling).

Lazy compaction costs the forward nothing, but its blocks arrive some steps later and it needs free
blocks itself. So it is the rule, and this is what stands between a dry pool and a preemption.
"""

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vtoken.hole_filling import HoleFilling, choose_moves, choose_sources, make_filling
from vtoken.request import EvictingRequest

if TYPE_CHECKING:
    from vtoken.reclaimer import Reclaimer


Int32s = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


class Room:
    """Fills holes of the requests of one replica.

    Attributes:
        fillings: decided in the current step, for its orders.
    """

    def __init__(self, reclaimer: "Reclaimer") -> None:
        self.reclaimer = reclaimer
        self.port = reclaimer.port
        self.block_size = reclaimer.block_size
        self.enabled = reclaimer.options.backend in ("lazy_compaction", "hole_filling")
        self.fillings: list[HoleFilling] = []

    def take_orders(self) -> tuple[HoleFilling, ...]:
        orders = tuple(self.fillings)
        self.fillings.clear()
        return orders

    def make(self, count: int) -> bool:
        """Free ``count`` more blocks in this very step, or as many as there are.

        Policies run early where that helps, and open plans are given up, but only after requests
        without one.
        """
        wanted = self.port.num_free() + count
        for _, request in self._candidates(patient=False):
            if self.port.num_free() >= wanted:
                break
            self.fill(request)
        # In the end the destinations of every open plan that has some.
        for request in list(self.reclaimer.requests.values()):
            plan = request.open_plan
            if self.port.num_free() < wanted and plan is not None and plan.destination_blocks.size:
                self.reclaimer.abort(request, "hole_filling")
        return self.port.num_free() >= wanted

    def make_for_admission(self, wanted: int) -> None:
        """Have ``wanted`` free blocks, if that is possible without giving up an open plan: what
        open plans will give back an admission can wait for."""
        requests = self.reclaimer.requests.values()
        surplus = {r.request_id: self.port.surplus(r.request_id) for r in requests}
        if not any(surplus.values()):
            return
        candidates = [
            (min(bound, surplus[request.request_id]), request)
            for bound, request in self._candidates()
            if request.open_plan is None
        ]
        coming = self.port.num_free() + self.reclaimer.two_phase.gain()
        if coming + sum(gain for gain, _ in candidates) < wanted:
            return
        for gain, request in candidates:
            if gain and wanted > self.port.num_free() + self.reclaimer.two_phase.gain():
                self.fill(request)

    def is_dry(self) -> bool:
        """Whether the pool could not serve each evicting request a block. Then no plan is opened,
        since its destinations would be missing before it closes."""
        return self.enabled and self.port.num_free() < len(self.reclaimer.requests)

    def drip(self) -> None:
        """Fill the holes of some requests.

        Many of equal length all need a block in one step; filled only then, they make that step
        slow. Each needs one every ``block_size`` steps, so this many a step keep up.
        """
        count = len(self.reclaimer.requests) // self.block_size + 1
        for _, request in islice(self._candidates(), count):
            if request.open_plan is None:
                self.fill(request)

    def fill(self, request: EvictingRequest) -> None:
        """Reclaim in place all that one request has to give, once a step: the moves of a step are
        one copy, which must not read what it has written."""
        length = self.port.length(request.request_id)
        if length == request.filled_at:
            return
        request.filled_at = length
        if request.excess(length):
            self.reclaimer.policy_runs.run(request, length, short=True)
        if request.is_over:
            return
        if request.open_plan is not None:
            self.reclaimer.abort(request, "hole_filling")
        table, request_id = request.table, request.request_id
        table.sync_new_tokens(self.port.row_from(request_id, len(table.block_ids)), length)
        movable = self.port.private(request_id)
        movable[max(table.tail, 0) :] = False
        sources = choose_sources(table.block_live, movable, self.block_size, movable.size)
        if sources.size:
            self._carry_out(request, sources, movable)
        self.reclaimer.planner.forget(request_id)

    def _carry_out(self, request: EvictingRequest, sources: Int32s, movable: Mask) -> None:
        """Row, shift and blocks change now; the bytes move before the forward of this step."""
        table, row, size = request.table, list(request.table.block_ids), self.block_size
        moved, holes = choose_moves(table, movable, sources)
        plan = make_filling(request.request_id, request.incarnation, table, (sources, moved, holes))
        audit = self.reclaimer.audit
        gone = table.positions[plan.gone(table)] if audit.enabled else ()
        overwritten = dict.fromkeys(row[i] for i in (holes // size).tolist())
        # Blocks from the tail on may have got a hash in this very step, for tokens that will be
        # computed without what is reclaimed here.
        self.port.forget_hashes([*overwritten, *row[table.tail :]])
        table.fill_holes(sources, moved, holes)
        self.port.replace_row(request.request_id, table.block_ids, table.shift)
        self.port.give_back([row[i] for i in sources[::-1]])
        self.fillings.append(plan)
        self.reclaimer.stats.fill(plan)
        request.forget_reads()
        request.totals.blocks_given_back += sources.size
        request.totals.reclaims += 1
        audit.note(request, "reclaim", positions=gone, blocks_before=len(row))

    def _candidates(self, patient: bool = True) -> Iterator[tuple[int, EvictingRequest]]:
        """(blocks it may give, request) of those worth a look, those with most to give first.

        Args:
            patient: leave alone who has not grown by a block since the last look.
        """
        if not self.enabled:
            return
        requests = self.reclaimer.requests.values()
        wait = self.block_size if patient else 1
        bounds = [(self._bound(request, wait), request) for request in requests]
        bounds.sort(key=lambda item: (item[1].open_plan is not None, -item[0]))
        yield from (item for item in bounds if item[0])

    def _bound(self, request: EvictingRequest, wait: int) -> int:
        """Blocks that the request holds beyond what its policy would leave live; 0 less than
        ``wait`` tokens after the last look."""
        length = self.port.length(request.request_id)
        if request.is_over or length < request.filled_at + wait:
            return 0
        resident, live = length - request.table.shift, request.num_live(length)
        return (resident - live + request.excess(length)) // self.block_size
