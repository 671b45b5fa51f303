# SPDX-License-Identifier: Apache-2.0
"""What a replica says about itself, and about a request that has finished. Plain data."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from vllm.v1.request import Request

from scheduler.admission import blocks_for

if TYPE_CHECKING:
    from worker.scheduler import VTokenScheduler

Mask = npt.NDArray[np.bool_]


def finished_request(scheduler: "VTokenScheduler", request: Request) -> dict[str, Any]:
    """What eviction did to a request. Call before its row is given up.

    ``blocks_held`` is the length of vLLM's own row at that moment.
    """
    request_id = request.request_id
    manager = scheduler.block_manager
    held = len(manager.req_to_blocks.get(request_id, ()))
    totals = scheduler.reclaimer.totals.get(request_id)
    live = _live_tokens(scheduler, request)
    capacity = held * scheduler.block_size
    return {
        "policy": scheduler.eviction[request_id].policy,
        "policy_error": totals.policy_error if totals else "",
        "scores_nan": totals.scores_nan if totals else 0,
        "tokens_evicted": totals.tokens_evicted if totals else 0,
        "tokens_live": live,
        "blocks_held": held,
        "blocks_given_back": totals.blocks_given_back if totals else 0,
        "reclaims": totals.reclaims if totals else 0,
        "preemptions": request.num_preemptions,
        "fragmentation": round(1 - live / capacity, 4) if capacity else 0.0,
    }


def replica_status(scheduler: "VTokenScheduler") -> dict[str, Any]:
    """Blocks, tokens and counters of a replica. Walks all requests: for people and scrapes."""
    reclaimer = scheduler.reclaimer
    total, free = reclaimer.port.num_blocks(), reclaimer.port.num_free()
    live, dead = _tokens(scheduler)
    stats, capacity = reclaimer.stats, (total - free) * scheduler.block_size
    return {
        "blocks_total": total,
        "blocks_free": free,
        "blocks_live": blocks_for(live, scheduler.block_size),
        "blocks_reclaimable": reclaimer.planner.reclaimable(reclaimer.requests.values()),
        "tokens_live": live,
        "tokens_dead_resident": dead,
        "fragmentation": round(1 - live / capacity, 4) if capacity else 0.0,
        "plans_prepared": stats.plans_prepared,
        "plans_committed": stats.plans_committed,
        "plans_aborted": dict(stats.plans_aborted),
        "holes_filled": stats.holes_filled,
        "tokens_moved": stats.tokens_moved,
        "bytes_moved": stats.tokens_moved * scheduler.bytes_per_token,
        "blocks_given_back": stats.blocks_given_back,
        "scores_nan": stats.scores_nan,
        "policies_disabled": stats.policies_disabled,
        "peak_blocks_used": scheduler.peak_blocks_used,
        "requests_running": len(scheduler.running),
        "requests_waiting": len(scheduler.waiting),
        "preemptions": scheduler.num_preemptions,
    }


def _tokens(scheduler: "VTokenScheduler") -> tuple[int, int]:
    """(live, dead but resident) tokens of running requests; those of a shared block count once, and
    are live if they are for anybody."""
    manager, size = scheduler.block_manager, scheduler.block_size
    live = resident = 0
    live_in: dict[int, Mask] = {}  # of shared blocks
    for request in scheduler.running:
        request_id = request.request_id
        evicting = scheduler.reclaimer.requests.get(request_id)
        live += _live_tokens(scheduler, request)
        resident += request.num_computed_tokens - manager.shift.get(request_id, 0)
        for index, block in enumerate(manager.req_to_blocks[request_id]):
            if block.ref_cnt > 1:
                here = np.ones(size, np.bool_)
                if evicting is not None:  # tokens that its table has not registered yet are live
                    known = evicting.table.live[index * size : (index + 1) * size]
                    here[: known.size] = known
                live -= int(here.sum())
                resident -= size
                live_in[block.block_id] = live_in.get(block.block_id, False) | here
    live += sum(int(mask.sum()) for mask in live_in.values())
    return live, resident + size * len(live_in) - live


def _live_tokens(scheduler: "VTokenScheduler", request: Request) -> int:
    evicting = scheduler.reclaimer.requests.get(request.request_id)
    if evicting is None:
        return request.num_computed_tokens
    return evicting.num_live(request.num_computed_tokens)
