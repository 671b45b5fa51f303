"""A block pool without an engine: the reclaimer's BlockPort over plain lists."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class SimplePool:
    """Blocks 0..n-1. What is freed last is handed out first, as in vLLM.

    Attributes:
        free: block ids nobody holds; the last one is next.
        holders: block id -> rows and open plans that hold it.
        rows: request id -> its block ids.
        lengths: request id -> its tokens.
        pending: how many of them the step that is being scheduled adds.
        owed: what ``growth`` answers.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.total = num_blocks
        self.block_size = block_size
        self.free = list(range(num_blocks))
        self.holders: Counter[int] = Counter()
        self.rows: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.shifts: dict[str, int] = {}
        self.pending: Counter[str] = Counter()
        self.owed = 0

    # -- BlockPort -----------------------------------------------------------------------------

    def num_blocks(self) -> int:
        return self.total

    def num_free(self) -> int:
        return len(self.free)

    def take(self, count: int) -> list[int]:
        assert count <= len(self.free), "taken without looking"
        taken = [self.free.pop() for _ in range(count)]
        self.holders.update(taken)
        return taken

    def give_back(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            assert self.holders[block_id] > 0, f"block {block_id} is given back twice"
            self.holders[block_id] -= 1
            if not self.holders[block_id]:
                self.free.append(block_id)

    def length(self, request_id: str) -> int:
        return self.lengths[request_id] - self.pending[request_id]

    def row_from(self, request_id: str, start: int) -> list[int]:
        return self.rows[request_id][start:]

    def private(self, request_id: str) -> npt.NDArray[np.bool_]:
        return np.array([self.holders[block] == 1 for block in self.rows[request_id]], np.bool_)

    def forget_hashes(self, block_ids: Sequence[int]) -> None:
        """Nothing is hashed here."""

    def replace_row(self, request_id: str, block_ids: Sequence[int], shift: int) -> None:
        self.rows[request_id] = list(block_ids)
        self.shifts[request_id] = shift

    def growth(self) -> int:
        return self.owed

    def surplus(self, request_id: str) -> int:
        return len(self.rows[request_id])  # nothing is promised to anybody here

    # -- the engine's side ---------------------------------------------------------------------

    def begin(self, request_id: str, shared: Sequence[int], num_tokens: int) -> None:
        """A row that starts with blocks of another one."""
        self.rows[request_id] = list(shared)
        self.holders.update(shared)
        self.lengths[request_id] = num_tokens
        self.shifts[request_id] = 0

    def missing(self, request_id: str, num_tokens: int) -> int:
        """Blocks that the request lacks for that many more tokens."""
        resident = self.lengths[request_id] + num_tokens - self.shifts[request_id]
        return max(0, -(-resident // self.block_size) - len(self.rows[request_id]))

    def grow(self, request_id: str, num_tokens: int) -> list[int]:
        """Append tokens and the blocks they need; the new block ids."""
        new = self.take(self.missing(request_id, num_tokens))
        self.rows[request_id].extend(new)
        self.lengths[request_id] += num_tokens
        return new

    def end(self, request_id: str) -> None:
        self.give_back(self.rows.pop(request_id)[::-1])
        del self.lengths[request_id], self.shifts[request_id]

    def check(self, num_destinations: int) -> None:
        """I5, and that every count is right."""
        held = Counter(block for row in self.rows.values() for block in row)
        assert len(self.free) + len(held) + num_destinations == self.total, "I5"
        assert len(set(self.free)) == len(self.free)
        for block, count in held.items():
            assert self.holders[block] == count, f"block {block} is held by somebody else"
