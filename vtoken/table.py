# SPDX-License-Identifier: Apache-2.0
"""The token table of one request: which text positions are resident, live, and where.

Index i of a row is slot ``block_ids[i // S] * S + i % S``. Resident tokens fill the row densely,
so one integer (``shift``) says how many tokens have left it. Paper section 3.2.

    row      | block 0 | block 1 | ... | tail block (partial, in no plan) |
    index    0         S         2S                       resident
"""

import hashlib
from collections.abc import Sequence
from itertools import compress

import numpy as np
import numpy.typing as npt

from vtoken.errors import InvariantError, PlanError

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class TokenTable:
    """Maps the resident tokens of one request to slots, and knows which of them are live.

    Invariants: I2 (one slot per position) and I8 (``shift`` is a multiple of the block size).
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.length = 0
        self.shift = 0
        self.epoch = 0
        self.num_live = 0
        self.block_ids: list[int] = []
        self._positions: Int32s = np.empty(8 * block_size, np.int32)
        self._live: Mask = np.empty(8 * block_size, np.bool_)
        self._block_live: Int32s = np.zeros(8, np.int32)

    @property
    def resident(self) -> int:
        return self.length - self.shift

    @property
    def positions(self) -> Int32s:
        """int32 ``[resident]``: text position of each index. A view, not to be written."""
        return self._positions[: self.resident]

    @property
    def live(self) -> Mask:
        """bool ``[resident]``: whether the policy still wants each index. A view."""
        return self._live[: self.resident]

    @property
    def block_live(self) -> Int32s:
        """int32 ``[blocks of the row]``: live tokens in each block. A view."""
        return self._block_live[: len(self.block_ids)]

    @property
    def tail(self) -> int:
        """Row index of the last block that holds a token (-1: none). It is in no plan."""
        return (self.resident - 1) // self.block_size

    @property
    def has_dead_block(self) -> bool:
        """Whether all tokens of a block before the tail are dead."""
        return bool((self._block_live[: max(self.tail, 0)] == 0).any())

    def slots(self) -> Int64s:
        """int64 ``[resident]``: the slot of each index."""
        starts = np.array(self.block_ids, np.int64) * self.block_size
        return (starts[:, None] + np.arange(self.block_size)).reshape(-1)[: self.resident]

    @property
    def fragmentation(self) -> float:
        """F of this request: 1 - live tokens / capacity of its row (paper, equation 1)."""
        capacity = len(self.block_ids) * self.block_size
        return 1 - self.num_live / capacity if capacity else 0.0

    def sync_new_tokens(self, new_block_ids: Sequence[int], total_len: int) -> None:
        """Append ``new_block_ids`` to the row and register positions up to ``total_len``, live.

        Raises:
            PlanError: ``total_len`` is below the length known, or the row cannot hold it.
        """
        first, last = self.resident, total_len - self.shift
        if last < first or last > (len(self.block_ids) + len(new_block_ids)) * self.block_size:
            raise PlanError(
                f"{total_len} tokens do not fit: {self.length} known, shift {self.shift}, "
                f"{len(self.block_ids)} + {len(new_block_ids)} blocks of {self.block_size}"
            )
        self.block_ids.extend(new_block_ids)
        if last == first:
            self._reserve()
            return
        start, self.length = self.length, total_len
        self._reserve()
        self._positions[first:last] = np.arange(start, total_len, dtype=np.int32)
        self._live[first:last] = True
        self._count_live(first, last)
        self.num_live += last - first

    def evict_indices(self, indices: Int64s) -> None:
        """Mark distinct live indices dead. int64 ``[n]``. Nothing moves (paper section 3.2)."""
        self._live[indices] = False
        np.subtract.at(self._block_live, indices // self.block_size, 1)
        self.num_live -= indices.size

    def apply_moves(
        self, source_indices: Int32s, selected: Mask, destination_blocks: Sequence[int]
    ) -> None:
        """Splice the row: whole source blocks out, whole destination blocks in.

        Args:
            source_indices: int32 ``[k]``, row indices of the source blocks, ascending.
            selected: bool ``[k * S]``, the source tokens that move, in row order. They fill
                the destination blocks exactly.
            destination_blocks: ``d`` block ids; they take the place of the first source.
        """
        self.check_moves(source_indices, selected, len(destination_blocks))
        size, full, first = self.block_size, self.tail, int(source_indices[0])
        stays = np.ones(full, np.bool_)
        stays[source_indices] = False
        tokens = np.arange(full * size).reshape(full, size)
        moved = tokens[source_indices].reshape(-1)[selected]
        head, rest = tokens[:first].reshape(-1), tokens[first:][stays[first:]].reshape(-1)
        order = np.concatenate([head, moved, rest, np.arange(full * size, self.resident)])
        for array in (self._positions, self._live):
            array[: order.size] = array[order]
        kept = [block for i, block in enumerate(self.block_ids) if i >= full or stays[i]]
        self.block_ids = [*kept[:first], *destination_blocks, *kept[first:]]
        self.shift += (source_indices.size - len(destination_blocks)) * size
        self.epoch += 1
        self._recount()

    def fill_holes(self, source_indices: Int32s, moved: Int64s, holes: Int64s) -> None:
        """Splice whole source blocks out after moving tokens of theirs into holes elsewhere. The
        caller has checked that they fit (``check_filling``).

        Args:
            source_indices: int32 ``[k]``, row indices of the source blocks, ascending.
            moved, holes: int64 ``[n]``, row indices of the tokens and of what they overwrite.
        """
        size, resident = self.block_size, self.resident
        stays = np.ones(len(self.block_ids), np.bool_)
        stays[source_indices] = False
        kept = np.repeat(stays, size)[:resident]
        self.shift += source_indices.size * size
        for array in (self._positions, self._live):
            array[holes] = array[moved]
            array[: self.resident] = array[:resident][kept]
        self.block_ids = list(compress(self.block_ids, stays.tolist()))
        self.epoch += 1
        self._recount()

    def check_sources(self, source_indices: Int32s) -> None:
        """Raise PlanError unless they are full blocks before the tail, ascending (I4, I8)."""
        ascending = (source_indices[1:] > source_indices[:-1]).all()
        if not source_indices.size or not ascending or source_indices[0] < 0:
            raise PlanError(f"source indices {source_indices.tolist()} are not ascending")
        if source_indices[-1] >= self.tail:
            raise PlanError(f"source {source_indices[-1]} is not before the tail {self.tail}")

    def check_moves(self, source_indices: Int32s, selected: Mask, num_destinations: int) -> None:
        """Raise PlanError unless the selected tokens of sources fill the destinations exactly."""
        self.check_sources(source_indices)
        if selected.size != source_indices.size * self.block_size:
            raise PlanError(f"bitmap of {selected.size} for {source_indices.size} blocks")
        if int(selected.sum()) != num_destinations * self.block_size:
            raise PlanError(f"{int(selected.sum())} tokens do not fill {num_destinations} blocks")

    def digest(self) -> int:
        """64 bits over everything that shards must agree on: row, shift, epoch, positions."""
        h = hashlib.blake2b(digest_size=8)
        h.update(np.array([self.length, self.shift, self.epoch], np.int64).tobytes())
        h.update(np.array(self.block_ids, np.int64).tobytes())
        h.update(self.positions.tobytes())
        return int.from_bytes(h.digest(), "little", signed=True)

    def check(self) -> None:
        """Raise InvariantError unless I2 and I8 hold and the incremental counts are right."""
        positions = self.positions
        if np.unique(positions).size != positions.size:
            raise InvariantError("I2: a position has two slots")
        if positions.size and (positions.min() < 0 or positions.max() >= self.length):
            raise InvariantError("I2: a position is outside the text")
        if len(set(self.block_ids)) != len(self.block_ids):
            raise InvariantError("I2: a block is twice in the row")
        if self.shift % self.block_size or self.shift < 0:
            raise InvariantError(f"I8: shift {self.shift} is not a multiple of the block size")
        counts, total = self._block_live.copy(), self.num_live
        self._recount()
        if total != self.num_live or not np.array_equal(counts, self._block_live):
            raise InvariantError("live counts differ from the table")

    def _reserve(self) -> None:
        capacity = self._positions.size
        if self.resident > capacity:
            grown = max(2 * capacity, self.resident)
            self._positions = np.resize(self._positions, grown)
            self._live = np.resize(self._live, grown)
        num_blocks = self._block_live.size
        if len(self.block_ids) > num_blocks:
            more = max(num_blocks, len(self.block_ids) - num_blocks)
            self._block_live = np.concatenate([self._block_live, np.zeros(more, np.int32)])

    def _count_live(self, first: int, last: int) -> None:
        """Add the new live indices [first, last) to the per-block counts."""
        size = self.block_size
        low, high = first // size, (last - 1) // size
        self._block_live[low : high + 1] += size
        self._block_live[low] -= first - low * size
        self._block_live[high] -= (high + 1) * size - last

    def _recount(self) -> None:
        blocks = np.flatnonzero(self.live) // self.block_size
        self._block_live = np.bincount(blocks, minlength=self._block_live.size).astype(np.int32)
        self.num_live = int(blocks.size)
