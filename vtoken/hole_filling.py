# SPDX-License-Identifier: Apache-2.0
"""Reclaiming in place: live tokens of the emptiest blocks overwrite dead ones elsewhere in the row.

It needs no destination and moves the fewest tokens, but it runs on the main stream, before the
forward of the step that carries it. Row, shift and freed blocks change in the schedule() that
decides it, so nothing is voted on: a shard on which it does not fit is broken and says so.
"""

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vtoken.errors import PlanError
from vtoken.table import TokenTable

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HoleFilling:
    """One reclaim of one request in place, complete and never changed.

    Attributes:
        incarnation: of the request; a resumed request is another incarnation.
        epoch: of the token table before it.
        length: of the request then, logical tokens.
        source_indices: int32 ``[k]``, row indices of the blocks that leave the row, ascending.
        moved: int64 ``[n]``, row indices of their live tokens, ascending; all of them move.
        holes: int64 ``[n]``, row indices of the dead tokens that they overwrite, ascending.
        digest: what a shard must compute from its own table (``filling_digest``).
    """

    request_id: str
    incarnation: int
    epoch: int
    length: int
    source_indices: Int32s
    moved: Int64s
    holes: Int64s
    digest: int

    def moves(self, table: TokenTable) -> tuple[Int64s, Int64s]:
        """(source slots, destination slots) by the row of a table before it, int64 ``[n]``."""
        blocks, size = np.array(table.block_ids, np.int64), table.block_size
        moved, holes = self.moved, self.holes
        return (
            blocks[moved // size] * size + moved % size,
            blocks[holes // size] * size + holes % size,
        )

    def gone(self, table: TokenTable) -> Int64s:
        """Row indices of the tokens that leave the row, by a table before it."""
        leaves = np.zeros(table.resident, np.bool_)
        leaves[: table.tail * table.block_size].reshape(table.tail, -1)[self.source_indices] = True
        leaves[self.moved] = False
        leaves[self.holes] = True
        return np.flatnonzero(leaves)


def choose_sources(
    block_live: Int32s, movable: npt.NDArray[np.bool_], block_size: int, limit: int
) -> Int32s:
    """The emptiest movable blocks whose live tokens fit into holes of the other movable ones.

    Args:
        block_live: int32 ``[blocks]``, live tokens of each block of the row.
        movable: bool ``[blocks]``, full, private and before the tail.
        block_size: S, tokens a block.
        limit: most blocks to take.

    Returns:
        int32 row indices, ascending; as many as the limit and the holes allow, perhaps none.
    """
    candidates = np.flatnonzero(movable)
    needed = -(-int(block_live[candidates].sum()) // block_size)
    count = min(candidates.size - needed, limit)
    order = np.argsort(block_live[candidates], kind="stable")[:count]
    return np.sort(candidates[order]).astype(np.int32)


def choose_moves(
    table: TokenTable, movable: npt.NDArray[np.bool_], source_indices: Int32s
) -> tuple[Int64s, Int64s]:
    """(live tokens of the sources, as many holes of the other movable blocks), row indices.

    Holes are taken from the head of the row on, so that what is dead gathers towards its end.
    """
    size, live = table.block_size, table.live
    source = np.zeros(movable.size, np.bool_)
    source[source_indices] = True
    tokens = live.size // size * size  # whole blocks; the tail is in neither set
    in_source = np.repeat(source, size)[:tokens]
    in_target = np.repeat(movable & ~source, size)[:tokens]
    moved = np.flatnonzero(in_source & live[:tokens])
    holes = np.flatnonzero(in_target & ~live[:tokens])[: moved.size]
    return moved, holes


def check_filling(plan: HoleFilling, table: TokenTable) -> None:
    """Raise PlanError unless a filling is about whole blocks before the tail of this row."""
    size, tail = table.block_size, table.tail
    table.check_sources(plan.source_indices)
    if plan.moved.size != plan.holes.size:
        raise PlanError(f"{plan.moved.size} tokens for {plan.holes.size} holes")
    for what, indices in (("tokens", plan.moved), ("holes", plan.holes)):
        ascending = (indices[1:] > indices[:-1]).all()
        if indices.size and not (ascending and indices[0] >= 0 and indices[-1] < tail * size):
            raise PlanError(f"{what} {indices.tolist()} are not ascending before the tail {tail}")
    is_source = np.zeros(tail, np.bool_)
    is_source[plan.source_indices] = True
    if not is_source[plan.moved // size].all():
        raise PlanError("a token moves that is in no source block")
    if is_source[plan.holes // size].any():
        raise PlanError("a hole is in a source block")


def filling_digest(plan: HoleFilling, table: TokenTable) -> int:
    """64 bits over a filling and what a table says about the tokens and blocks concerned.

    Each side passes its OWN table, so that equal digests mean equal tables where it matters (I6).
    """
    header = np.array([plan.incarnation, plan.epoch, plan.length], np.int64)
    h = hashlib.blake2b(plan.request_id.encode(), digest_size=8)
    for array in (header, plan.source_indices, *plan.moves(table)):
        h.update(array.tobytes())
    for indices in (plan.moved, plan.holes):
        h.update(table.positions[indices].tobytes())
    return int.from_bytes(h.digest(), "little", signed=True)


def make_filling(
    request_id: str, incarnation: int, table: TokenTable, change: tuple[Int32s, Int64s, Int64s]
) -> HoleFilling:
    """Fix a change (sources, moved, holes) of a request's table as it is now."""
    plan = HoleFilling(request_id, incarnation, table.epoch, table.length, *change, digest=0)
    return replace(plan, digest=filling_digest(plan, table))
