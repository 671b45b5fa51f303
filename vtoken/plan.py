# SPDX-License-Identifier: Apache-2.0
"""What travels between the scheduler and the shards of a replica.

Down, with a step: PREPARE (a plan), COMMIT or ABORT (a plan id), holes to fill, requests to
measure. Up, with its output: votes and measurements.
Everything is frozen: with an in-process executor both sides hold the same objects.
"""

import hashlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vtoken.errors import PlanError
from vtoken.hole_filling import HoleFilling
from vtoken.signals import Observation, Probe

Int32s = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class RelocationPlan:
    """One reclaim of one request, complete and never changed (paper section 3.3, stage 3).

    Attributes:
        plan_id: unique within the replica, ascending.
        incarnation: of the request; a resumed request is another incarnation.
        epoch: of the token table the plan was made from.
        length: of the request then, logical tokens.
        block_size: S, tokens a block.
        source_indices: int32 ``[k]``, row indices of the source blocks, ascending.
        source_blocks: int32 ``[k]``, their block ids.
        kept: bool ``[k * S]``, live source tokens; all of them move.
        fillers: bool ``[k * S]``, dead tokens that ride along to fill the last destination.
        destination_blocks: int32 ``[d]``, d < k; filled in order.
        digest: what a shard must compute from its own table (``plan_digest``).
    """

    plan_id: int
    request_id: str
    incarnation: int
    epoch: int
    length: int
    block_size: int
    source_indices: Int32s
    source_blocks: Int32s
    kept: Mask
    fillers: Mask
    destination_blocks: Int32s
    digest: int

    @property
    def selected(self) -> Mask:
        return self.kept | self.fillers

    @property
    def gain(self) -> int:
        """Blocks that the plan gives back if every source is private."""
        return self.source_blocks.size - self.destination_blocks.size

    @property
    def num_moves(self) -> int:
        return self.destination_blocks.size * self.block_size

    def check_shapes(self, block_size: int) -> None:
        """Raise PlanError if its arrays do not belong together, or to blocks of this size."""
        if self.block_size != block_size:
            raise PlanError(f"blocks of {self.block_size} tokens, here of {block_size}")
        if self.source_blocks.shape != self.source_indices.shape:
            raise PlanError(
                f"{self.source_blocks.size} source blocks at {self.source_indices.size} indices"
            )
        for bitmap in (self.kept, self.fillers):
            if bitmap.shape != (self.source_indices.size * block_size,):
                raise PlanError(f"bitmap of {bitmap.size} for {self.source_indices.size} blocks")

    def source_tokens(self) -> npt.NDArray[np.int64]:
        """Indices in the request's row of all source tokens, int64 ``[k * S]``."""
        starts = self.source_indices.astype(np.int64) * self.block_size
        return (starts[:, None] + np.arange(self.block_size)).reshape(-1)

    def moves(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(source slots, destination slots), int64 ``[num_moves]`` each, in row order."""
        chosen = np.flatnonzero(self.selected)
        block, offset = np.divmod(chosen, self.block_size)
        sources = self.source_blocks.astype(np.int64)[block] * self.block_size + offset
        offsets = np.arange(self.block_size, dtype=np.int64)
        starts = self.destination_blocks.astype(np.int64) * self.block_size
        return sources, (starts[:, None] + offsets).reshape(-1)


def plan_digest(plan: RelocationPlan, moved_positions: Int32s) -> int:
    """64 bits over a plan and the text positions that a table says it moves.

    Each side passes the positions of its OWN table, so that equal digests mean equal tables
    where it matters (I6).
    """
    h = hashlib.blake2b(digest_size=8)
    h.update(plan.request_id.encode())
    h.update(
        np.array([plan.plan_id, plan.incarnation, plan.epoch, plan.length], np.int64).tobytes()
    )
    for array in (plan.source_indices, plan.source_blocks, plan.destination_blocks):
        h.update(np.ascontiguousarray(array, np.int32).tobytes())
    h.update(plan.kept.tobytes() + plan.fillers.tobytes())
    h.update(np.ascontiguousarray(moved_positions, np.int32).tobytes())
    return int.from_bytes(h.digest(), "little", signed=True)


@dataclass(frozen=True)
class StepOrders:
    """What a scheduler output carries down.

    Attributes:
        started: request id -> incarnation, for requests whose row begins anew in this step.
        commits: ids of the plans whose splice takes effect before this step's own appends.
        aborts: ids of the plans whose destinations are already back in the pool.
        fillings: reclaims in place, to be done after those and before this step's forward.
        prepares: plans to copy after this step's forward.
        probes: requests to measure after it.
    """

    started: dict[str, int] = field(default_factory=dict)
    commits: tuple[int, ...] = ()
    aborts: tuple[int, ...] = ()
    fillings: tuple[HoleFilling, ...] = ()
    prepares: tuple[RelocationPlan, ...] = ()
    probes: tuple[Probe, ...] = ()

    def __bool__(self) -> bool:
        closed, opened = self.commits or self.aborts, self.prepares or self.probes
        return bool(self.started or closed or self.fillings or opened)

    def wants_answer(self) -> bool:
        return bool(self.prepares or self.probes)


NO_ORDERS = StepOrders()


@dataclass(frozen=True)
class Vote:
    """What one shard says about one plan.

    ``ok`` is the answer to PREPARE: the plan fits the shard's own table, whose digest is
    ``digest``. ``copied`` says that every byte has arrived, and only then may it be committed.
    """

    plan_id: int
    rank: int
    digest: int
    ok: bool
    copied: bool
    reason: str = ""


@dataclass(frozen=True)
class StepReport:
    """What a model runner's output carries up."""

    votes: tuple[Vote, ...] = ()
    observations: tuple[Observation, ...] = ()
