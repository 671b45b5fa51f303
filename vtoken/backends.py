# SPDX-License-Identifier: Apache-2.0
"""Which blocks to reclaim: pure functions over per-block live counts (paper section 3.3)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vtoken.hole_filling import choose_sources

Int32s = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Limits:
    """Bounds of one plan, in blocks: sources it may take, destinations it may be given."""

    max_sources: int
    max_destinations: int


@dataclass(frozen=True)
class Draft:
    """Sources (int32 ``[k]`` row indices, ascending) and how many destinations they need."""

    source_indices: Int32s
    num_destinations: int

    @property
    def gain(self) -> int:
        return self.source_indices.size - self.num_destinations


Backend = Callable[[Int32s, Mask, int, Limits], Draft | None]


def lazy_compaction(
    block_live: Int32s, movable: Mask, block_size: int, limits: Limits
) -> Draft | None:
    """Pack the emptiest movable blocks into fewer new ones.

    Args:
        block_live: int32 ``[blocks]``, live tokens of each block of the row.
        movable: bool ``[blocks]``, full, private, before the tail and in no other plan.
        block_size: S, tokens a block.
        limits: bounds of the plan.

    Returns:
        The draft with the largest gain, of those the one with the fewest sources, or None if
        nothing frees strictly more blocks than it takes. For a number of sources, taking the
        emptiest is optimal: the gain only depends on the sum of their live tokens.
    """
    candidates = np.flatnonzero(movable & (block_live < block_size))
    if candidates.size == 0:
        return None
    order = candidates[np.argsort(block_live[candidates], kind="stable")][: limits.max_sources]
    destinations = -(-np.cumsum(block_live[order]) // block_size)
    gain = np.arange(1, order.size + 1) - destinations
    gain[destinations > limits.max_destinations] = 0
    best = int(np.argmax(gain))
    if gain[best] < 1:
        return None
    return Draft(np.sort(order[: best + 1]).astype(np.int32), int(destinations[best]))


def whole_blocks(
    block_live: Int32s, movable: Mask, block_size: int, limits: Limits
) -> Draft | None:
    """Naive eviction: give back only blocks whose tokens are all dead; nothing is copied."""
    dead = np.flatnonzero(movable & (block_live == 0))[: limits.max_sources]
    return Draft(dead.astype(np.int32), 0) if dead.size else None


def hole_filling(
    block_live: Int32s, movable: Mask, block_size: int, limits: Limits
) -> Draft | None:
    """Empty blocks into holes of the others, in place (``vtoken/room.py`` carries it out)."""
    sources = choose_sources(block_live, movable, block_size, limits.max_sources)
    return Draft(sources, 0) if sources.size else None


def none(block_live: Int32s, movable: Mask, block_size: int, limits: Limits) -> Draft | None:
    """Mark tokens dead and never reclaim: the waste itself, for measurements."""
    return None


BACKENDS: dict[str, Backend] = {
    "lazy_compaction": lazy_compaction,
    "hole_filling": hole_filling,
    "whole_blocks": whole_blocks,
    "none": none,
}
