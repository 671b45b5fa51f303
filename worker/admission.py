# SPDX-License-Identifier: Apache-2.0
"""Admission arithmetic applied to vLLM's requests (the arithmetic itself is in scheduler/)."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from scheduler.admission import (
    Demand,
    Footprint,
    Lag,
    blocks_for,
    footprint_of,
    headroom_blocks,
    required_blocks,
)
from vtoken.options import EvictionOptions
from vtoken.ticks import MAX_TICKS

if TYPE_CHECKING:
    from worker.scheduler import VTokenScheduler


class Admission:
    """Answers for the block manager and the planner, from the scheduler's own state.

    Attributes:
        blocked: an admission or an allocation of this step found too few free blocks.
        wanted: free blocks that an admission of this step asked for in vain, if giving back what
            requests hold beyond their caps could be enough; else 0.
    """

    def __init__(self, scheduler: "VTokenScheduler") -> None:
        self.scheduler = scheduler
        self.block_size = scheduler.block_size
        self.steps = scheduler.depth + 1
        self.compacts = scheduler.replica_options.backend in ("lazy_compaction", "hole_filling")
        late = -(-scheduler.max_num_running_reqs // MAX_TICKS)
        self.lag = Lag(scheduler.depth, late)
        self.blocked = False
        self.wanted = 0
        self._footprints: dict[str, Footprint] = {}

    def begin_step(self) -> int:
        """Forget what the last step lacked; the free blocks that an admission waits for."""
        wanted, self.wanted, self.blocked = self.wanted, 0, False
        return wanted

    def add(self, request: Request, options: EvictionOptions) -> None:
        """Register an evicting request."""
        prompt, full = request.num_prompt_tokens, self._full_tokens(request)
        footprint = footprint_of(options, prompt, full, self.block_size, self.lag)
        self._footprints[request.request_id] = footprint

    def book_in_full(self, request: Request) -> None:
        """Nothing more of it dies: it will hold all that it has not given back so far."""
        shift = self.scheduler.block_manager.shift.get(request.request_id, 0)
        full = blocks_for(self._full_tokens(request) - shift, self.block_size)
        self._footprints[request.request_id] = Footprint.in_full(full)

    def remove(self, request_id: str) -> None:
        self._footprints.pop(request_id, None)

    def to_admit(self, request_id: str, hits: Sequence[KVCacheBlock]) -> int | None:
        """Blocks that must be free to admit a waiting request; None: vLLM's own rule. If they are
        not, ``blocked`` and ``wanted`` say so to the reclaimer.

        Args:
            hits: prefix-cache blocks the request would share.
        """
        if not self.compacts:
            return None
        request = self.scheduler.requests[request_id]
        if request_id in self._footprints:
            cap, full = self._cap(request, len(hits)), self._footprints[request_id].full
        elif self._bounds()[0].full:  # not evicting: vLLM reserves the tokens known so far
            cap = full = blocks_for(request.num_tokens, self.block_size)
        else:
            return None
        # A hit on a block that nobody holds takes it from the free ones. One on a block that a
        # single request holds makes it shared: that request can reclaim it no more.
        unheld = sum(block.ref_cnt == 0 for block in hits)
        newly_shared = sum(block.ref_cnt == 1 for block in hits)
        fresh = unheld - len(hits)
        return self._or_wait(Demand(max(cap + fresh, 0) + newly_shared, max(full + fresh, 0)))

    def to_continue(self, missing: int) -> int:
        """The same for the next turn of a streaming session, which holds its row while it waits.

        Args:
            missing: blocks that it lacks.
        """
        required = None
        if self.compacts and self._bounds()[0].full:
            required = self._or_wait(Demand(missing, missing))
        return missing if required is None else required

    def _or_wait(self, new: Demand) -> int | None:
        """The free blocks that admitting it takes; if too few are, they are noted as wanted."""
        scheduler, port = self.scheduler, self.scheduler.reclaimer.port
        headroom = headroom_blocks(port.num_blocks(), scheduler.replica_options.headroom)
        least, surplus = self._bounds()
        at_full_length = new.full + least.full
        if at_full_length <= port.num_free():
            return at_full_length
        required = required_blocks(new, least, headroom)
        # Else nothing that can be given back is enough, and counting exactly takes longer.
        may_fit = required <= port.num_free() + surplus
        if may_fit:
            required = required_blocks(new, self._owed(), headroom)
        if required > port.num_free():
            if not scheduler.running:
                return None  # it might wait for ever: vLLM's own rule decides, and may preempt
            self.blocked, self.wanted = True, required if may_fit else 0
        return required

    def chunk(self, request: Request) -> int:
        """Most tokens of the request's prefill to compute in one step; 0: no limit."""
        footprint = self._footprints.get(request.request_id)
        return footprint.chunk_limit(request.num_tokens) if footprint is not None else 0

    def growth_blocks(self) -> int:
        """Blocks that running requests may need before a plan opened now can close."""
        size, steps, total = self.block_size, self.steps, 0
        manager = self.scheduler.block_manager
        rows, shifts = manager.req_to_blocks, manager.shift
        for request in self.scheduler.running:
            request_id = request.request_id
            tokens = request.num_computed_tokens + steps
            if request.is_prefill_chunk:
                known = request.num_tokens
                chunk = self.chunk(request) or known
                tokens = min(known, request.num_computed_tokens + steps * chunk) + steps
            resident = tokens - shifts.get(request_id, 0)
            total += max(0, -(-resident // size) - len(rows[request_id]))
        return total

    def surplus(self, request_id: str) -> int:
        """Blocks that a running request holds beyond its cap; 0 if it does not evict."""
        row = self.scheduler.block_manager.req_to_blocks[request_id]
        footprint = self._footprints.get(request_id)
        if footprint is None or len(row) <= footprint.least:
            return 0
        cap = self._cap(self.scheduler.requests[request_id], _num_shared(row))
        return max(0, len(row) - cap)

    def _owed(self) -> Demand:
        """What running evicting requests may still take."""
        capped = full = 0
        for request, footprint, row in self._running():
            capped += max(0, self._cap(request, _num_shared(row)) - len(row))
            full += max(0, footprint.full - len(row))
        return Demand(capped, full)

    def _bounds(self) -> tuple[Demand, int]:
        """(no more than ``_owed``, no less than the surplus of all running requests), without a
        look at who shares blocks and who still computes its prompt."""
        capped = full = surplus = 0
        for _, footprint, row in self._running():
            beyond = len(row) - footprint.least
            capped += max(0, -beyond)
            surplus += max(0, beyond)
            full += max(0, footprint.full - len(row))
        return Demand(capped, full), surplus

    def _running(self) -> Iterator[tuple[Request, Footprint, Sequence[KVCacheBlock]]]:
        """Running requests that evict, with their rows."""
        rows = self.scheduler.block_manager.req_to_blocks
        for request in self.scheduler.running:
            footprint = self._footprints.get(request.request_id)
            if footprint is not None:
                yield request, footprint, rows[request.request_id]

    def _full_tokens(self, request: Request) -> int:
        longest: int = request.num_prompt_tokens + request.max_tokens
        return min(longest, self.scheduler.max_model_len)

    def _cap(self, request: Request, num_shared: int) -> int:
        footprint = self._footprints[request.request_id]
        evicting = self.scheduler.reclaimer.requests.get(request.request_id)
        if evicting is not None and evicting.awaits_signals:
            return footprint.cap(evicting.prefill_end, num_shared)
        prefills = request.num_computed_tokens < request.num_tokens - 1
        return footprint.cap(request.num_tokens if prefills else 0, num_shared)


def _num_shared(row: Sequence[KVCacheBlock]) -> int:
    return len(row) - [block.ref_cnt for block in row].count(1)  # each is held at least once
