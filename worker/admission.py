# SPDX-License-Identifier: Apache-2.0
"""Admission arithmetic applied to vLLM's requests (the arithmetic itself is in scheduler/)."""

from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.request import Request

from scheduler.admission import (
    Demand,
    blocks_for,
    chunk_limit,
    growth_tokens,
    headroom_blocks,
    required_blocks,
    worst_blocks,
    worst_live,
)
from vtoken.options import EvictionOptions
from vtoken.ticks import MAX_TICKS

if TYPE_CHECKING:
    from worker.scheduler import VTokenScheduler


class Footprint(NamedTuple):
    """Worst cases of one evicting request, fixed when it arrives.

    Attributes:
        live: tokens its policy can leave it with.
        decode: private blocks while decoding.
        full: blocks of its full length.
    """

    live: int
    decode: int
    full: int


class Admission:
    """Answers for the block manager and the planner, from the scheduler's own state.

    Attributes:
        blocked: an admission or an allocation of this step found too few free blocks.
    """

    def __init__(self, scheduler: "VTokenScheduler") -> None:
        self.scheduler = scheduler
        self.block_size = scheduler.block_size
        self.steps = scheduler.depth + 1
        self.compacts = scheduler.replica_options.backend == "lazy_compaction"
        # Steps that a policy run may be late, as only so many share a step.
        self.late = scheduler.max_num_running_reqs // MAX_TICKS
        self.blocked = False
        self._footprints: dict[str, Footprint] = {}

    def add(self, request: Request, options: EvictionOptions) -> None:
        """Register an evicting request."""
        longest = request.num_prompt_tokens + request.max_tokens
        full_tokens = min(longest, self.scheduler.max_model_len)
        live = worst_live(options, request.num_prompt_tokens, full_tokens)
        growth = growth_tokens(self.steps, options.tick_tokens + self.late, 0)
        self._footprints[request.request_id] = Footprint(
            live,
            worst_blocks(live, growth, self.block_size),
            blocks_for(full_tokens, self.block_size),
        )

    def remove(self, request_id: str) -> None:
        self._footprints.pop(request_id, None)

    def required(self, request_id: str, num_hits: int, num_evictable: int) -> int | None:
        """Blocks that must be free to admit a waiting request; None: vLLM's own rule.

        Args:
            num_hits: prefix-cache blocks the request would share.
            num_evictable: those of them that nobody holds, so that a hit takes them from the
                free blocks.
        """
        if not self.compacts:
            return None
        scheduler = self.scheduler
        request, owed = scheduler.requests[request_id], self._owed()
        if request_id in self._footprints:
            cap, full = self._cap(request, num_hits), self._footprints[request_id].full
        elif owed.full:  # not evicting: vLLM reserves the tokens known so far
            cap = full = blocks_for(request.num_tokens, self.block_size)
        else:
            return None
        fresh = num_evictable - num_hits
        new = Demand(max(cap + fresh, 0), max(full + fresh, 0))
        total = scheduler.reclaimer.port.num_blocks()
        headroom = headroom_blocks(total, scheduler.replica_options.headroom)
        required = required_blocks(new, owed, headroom)
        if required > total and not scheduler.running:
            return None  # it would wait for ever: vLLM's own rule decides, and may preempt
        if required > scheduler.reclaimer.port.num_free():
            self.blocked = True
        return required

    def chunk(self, request: Request) -> int:
        """Most tokens of the request's prefill to compute in one step; 0: no limit."""
        footprint = self._footprints.get(request.request_id)
        if footprint is None:
            return 0
        return chunk_limit(footprint.live, request.num_tokens, self.block_size)

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

    def _owed(self) -> Demand:
        """What running evicting requests may still take."""
        capped = full = 0
        rows = self.scheduler.block_manager.req_to_blocks
        for request in self.scheduler.running:
            footprint = self._footprints.get(request.request_id)
            if footprint is not None:
                row = rows[request.request_id]
                # Sharing always begins at the head of a row.
                shared = sum(1 for _ in takewhile(lambda block: block.ref_cnt > 1, row))
                capped += max(0, self._cap(request, shared) - len(row))
                full += max(0, footprint.full - len(row))
        return Demand(capped, full)

    def _cap(self, request: Request, num_shared: int) -> int:
        footprint = self._footprints[request.request_id]
        private = footprint.decode
        if request.num_computed_tokens < request.num_tokens - 1:
            chunk = self.chunk(request)
            if chunk:
                growth = growth_tokens(self.steps, 0, chunk)
                private = max(private, worst_blocks(footprint.live, growth, self.block_size))
        return min(footprint.full, private + num_shared)
