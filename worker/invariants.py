# SPDX-License-Identifier: Apache-2.0
"""The invariants of a replica that the scheduler can check online (``VTOKEN_CHECK=1``).

I1 is checked where the bytes are, in the shard; I3 and I6 by the protocol itself.
"""

import os
from typing import TYPE_CHECKING

from vtoken.errors import InvariantError
from vtoken.options import ReplicaOptions

if TYPE_CHECKING:
    from worker.scheduler import VTokenScheduler


def checks_enabled(options: ReplicaOptions) -> bool:
    return options.check or os.environ.get("VTOKEN_CHECK") == "1"


def check_replica(scheduler: "VTokenScheduler") -> None:
    """Raise InvariantError unless I2, I4, I5 and I8 hold after a schedule()."""
    pool, rows = scheduler.block_manager.block_pool, scheduler.block_manager.req_to_blocks
    held = {block.block_id for row in rows.values() for block in row}
    destinations = [
        block_id
        for open_plan in scheduler.reclaimer.two_phase.open_plans.values()
        for block_id in open_plan.plan.destination_blocks.tolist()
    ]
    free, total = pool.get_num_free_blocks(), pool.num_gpu_blocks - 1
    if free + len(held) + len(destinations) != total:
        raise InvariantError(
            f"I5: {free} free + {len(held)} held + {len(destinations)} destinations != {total}"
        )
    if len(held.union(destinations)) != len(held) + len(destinations):
        raise InvariantError("I4: a destination is held by a request or by two plans")
    for request_id, request in scheduler.reclaimer.requests.items():
        request.table.check()
        row = [block.block_id for block in rows[request_id]]
        if row[: len(request.table.block_ids)] != request.table.block_ids:
            raise InvariantError(f"I2: the table of {request_id} has another row")
        plan = request.open_plan
        if plan is not None and int(plan.source_indices[-1]) >= request.table.tail:
            raise InvariantError(f"I8: the tail block of {request_id} is in a plan")
