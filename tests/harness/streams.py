"""Two device queues, what may run beside what, and the memory they share.

Every operation is checked when it is issued: two operations of different queues that touch one
block, at least one of them writing, must be ordered by an event. Whoever is issued later has to
have waited, so one look at issue time sees every race, whatever the timing of this run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vtoken.plan import RelocationPlan

Blocks = npt.NDArray[np.int64] | npt.NDArray[np.int32]
Slots = npt.NDArray[np.int64]


class OrderViolation(AssertionError):
    """Two operations on one block are not ordered."""


class Streams:
    """The main queue (forwards) and the migration queue (copies). Operations count from 1.

    Attributes:
        main: operations issued on main.
        migration: operations issued on migration.
    """

    def __init__(self, num_blocks: int) -> None:
        self.main = 0
        self.migration = 0
        self._main_saw = 0  # migration operations that main has waited for
        self._migration_saw = 0
        # Last operation per block.
        self._main_read, self._main_write, self._migration_read, self._migration_write = (
            np.zeros(num_blocks, np.int64) for _ in range(4)
        )

    def on_main(self, reads: Blocks, writes: Blocks) -> None:
        self.main += 1
        self._require(self._migration_write, reads, self._main_saw, "a forward reads")
        self._require(self._migration_write, writes, self._main_saw, "a forward writes")
        self._require(self._migration_read, writes, self._main_saw, "a forward writes")
        self._main_read[reads] = self.main
        self._main_write[writes] = self.main

    def on_migration(self, plan: RelocationPlan, after_main: int) -> int:
        """Issue a plan's copy behind main's operation ``after_main``; its own number."""
        self.migration += 1
        self._migration_saw = seen = max(self._migration_saw, after_main)
        sources, destinations = plan.source_blocks, plan.destination_blocks
        self._require(self._main_write, sources, seen, "a copy reads")
        self._require(self._main_write, destinations, seen, "a copy writes")
        self._require(self._main_read, destinations, seen, "a copy writes")
        self._migration_read[sources] = self.migration
        self._migration_write[destinations] = self.migration
        return self.migration

    def main_waits(self, operation: int) -> None:
        """Everything issued on main from now on runs after this migration operation."""
        self._main_saw = max(self._main_saw, operation)

    def _require(self, last: Slots, blocks: Blocks, seen: int, what: str) -> None:
        racing = blocks[last[blocks] > seen]
        if racing.size:
            raise OrderViolation(f"{what} {racing.tolist()} beside the other queue")


class Memory:
    """One cell a slot: which position lies there, and 64 bits standing for its K/V."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.positions = np.full(num_blocks * block_size, -1, np.int32)
        self.payloads = np.zeros(num_blocks * block_size, np.uint64)

    def slots(self, row: list[int], start: int, stop: int) -> Slots:
        """Slots of the indices [start, stop) of a row. Raises IndexError if it is too short."""
        index = np.arange(start, stop)
        blocks = np.array(row, np.int64)[index // self.block_size]
        return blocks * self.block_size + index % self.block_size


@dataclass
class Copy:
    plan: RelocationPlan
    operation: int
    has_run: bool = False


class FakeCopyEngine:
    """vToken's CopyEngine over the fake memory. A copy takes effect at the last moment allowed.

    Attributes:
        after_main: main's operation that a copy started now waits for.
        lag: the latest copies that are still on their way.
        deaf_to: plan ids whose ``wait`` is forgotten: a planted fault.
        corrupts: whether copies that end from now on garble one token.
    """

    def __init__(self, memory: Memory, streams: Streams) -> None:
        self.memory = memory
        self.streams = streams
        self.after_main = 0
        self.lag = 0
        self.deaf_to: set[int] = set()
        self.corrupts = False
        self.copies: dict[int, Copy] = {}

    @property
    def num_blocks(self) -> int:
        return self.memory.positions.size // self.memory.block_size

    def start(self, plans: Sequence[RelocationPlan]) -> None:
        for plan in plans:
            operation = self.streams.on_migration(plan, self.after_main)
            self.copies[plan.plan_id] = Copy(plan, operation)

    def is_done(self, plan_id: int) -> bool:
        copy = self.copies[plan_id]
        if not copy.has_run and copy.operation <= self.streams.migration - self.lag:
            self._run_up_to(copy.operation)
        return copy.has_run

    def wait(self, plan_id: int) -> None:
        copy = self.copies.get(plan_id)
        if copy is None or plan_id in self.deaf_to:
            return
        self._run_up_to(copy.operation)
        self.streams.main_waits(copy.operation)
        del self.copies[plan_id]

    def move(self, sources: Slots, destinations: Slots) -> None:
        size = self.memory.block_size
        self.streams.on_main(np.unique(sources // size), np.unique(destinations // size))
        for cells in (self.memory.positions, self.memory.payloads):
            cells[destinations] = cells[sources]

    def num_wrong_tokens(self, sources: Slots, destinations: Slots) -> int:
        memory = self.memory
        same = memory.payloads[sources] == memory.payloads[destinations]
        same &= memory.positions[sources] == memory.positions[destinations]
        return int((~same).sum())

    def _run_up_to(self, operation: int) -> None:
        """The migration queue is a queue: nothing overtakes."""
        for copy in self.copies.values():
            if copy.operation <= operation and not copy.has_run:
                sources, destinations = copy.plan.moves()
                for cells in (self.memory.positions, self.memory.payloads):
                    cells[destinations] = cells[sources]
                if self.corrupts and destinations.size:
                    self.memory.payloads[destinations[0]] ^= np.uint64(1)
                copy.has_run = True
