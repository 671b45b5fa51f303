"""A tensor-parallel rank without a model: the real shard, fake queues and memory."""

import pickle
from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from harness.fake_probe import FakeProbe
from harness.shadow import Shadow
from harness.streams import FakeCopyEngine, Memory, Streams
from vtoken.plan import StepOrders, StepReport
from vtoken.shard import Shard


@dataclass(frozen=True)
class Growth:
    """What a step adds to a request: blocks to a new or to a known row, and tokens."""

    begins: bool
    blocks: list[int]
    num_tokens: int


class Rank:
    """Executes steps at once; what it reports is heard when the test says so.

    Attributes:
        refuses: whether it pretends to know no row at the next PREPARE.
        garbles: whether the next copy to end arrives damaged.
        lies: whether the digests in its next report are wrong.
    """

    def __init__(self, number: int, num_blocks: int, block_size: int) -> None:
        self.memory = Memory(num_blocks, block_size)
        self.streams = Streams(num_blocks)
        self.engine = FakeCopyEngine(self.memory, self.streams)
        self.shard = Shard(number, block_size, self.engine, self._row_of, check=True)
        self.shard.probe = FakeProbe(self.memory)
        self.rows: dict[str, list[int]] = {}
        self.reports: deque[StepReport] = deque()
        self.refuses = self.garbles = self.lies = self._prepares = False

    def execute(
        self,
        orders: StepOrders,
        ended: set[str],
        growth: dict[str, Growth],
        texts: dict[str, Shadow],
    ) -> None:
        """One step, in the order that the protocol asks for."""
        orders = pickle.loads(pickle.dumps(orders))
        self.engine.corrupts = self.garbles
        for splice in self.shard.settle(orders):
            self.rows[splice.request_id] = splice.apply(self.rows[splice.request_id])
        for splice in self.shard.fill(orders.fillings):
            self.rows[splice.request_id] = splice.apply(self.rows[splice.request_id])
        for request_id in ended:
            self.shard.stop(request_id)
            self.rows.pop(request_id, None)
        for request_id, incarnation in orders.started.items():
            self.shard.start(request_id, incarnation)
        for request_id, grown in growth.items():
            self._forward(request_id, grown, texts[request_id])
        self.engine.after_main = self.streams.main
        observations = tuple(self.shard.observe(orders.probes)())
        self._prepares = True
        prepared, copied = self.shard.prepare(orders.prepares), self.shard.copied()
        self._prepares = False
        self.refuses &= not prepared
        self.garbles &= not copied
        votes = {vote.plan_id: vote for vote in (*prepared, *copied)}
        if self.lies and votes:
            self.lies = False
            votes = {i: replace(vote, digest=vote.digest ^ 1) for i, vote in votes.items()}
        self.reports.append(StepReport(tuple(votes.values()), observations))

    def _forward(self, request_id: str, grown: Growth, text: Shadow) -> None:
        """Check every resident token, then write the new ones behind them."""
        row = [] if grown.begins else self.rows[request_id]
        self.rows[request_id] = row = [*row, *grown.blocks]
        positions = text.resident
        assert len(positions) == text.length - self.shard.shift(request_id)
        payloads = np.array([text.payloads[p] for p in positions], np.uint64)
        slots = self.memory.slots(row, 0, len(positions))
        first_new = len(positions) - grown.num_tokens
        old, new = slots[:first_new], slots[first_new:]
        size = self.memory.block_size
        self.streams.on_main(np.unique(old // size), np.unique(new // size))
        assert self.memory.positions[old].tolist() == positions[:first_new], "I2"
        assert np.array_equal(self.memory.payloads[old], payloads[:first_new]), "I1"
        self.memory.positions[new] = positions[first_new:]
        self.memory.payloads[new] = payloads[first_new:]

    def _row_of(self, request_id: str) -> list[int] | None:
        row = self.rows.get(request_id)
        return list(row) if row is not None and not (self.refuses and self._prepares) else None
