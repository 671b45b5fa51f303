"""An engine in miniature around the real reclaimer and two real shards: no vLLM, blocks of 4."""

from collections import Counter, deque
from itertools import count

from harness.pool import SimplePool
from harness.ranks import Growth, Rank
from harness.shadow import Shadow
from vtoken.audit import AuditTrail
from vtoken.options import EvictionOptions, ReplicaOptions
from vtoken.plan import RelocationPlan
from vtoken.reclaimer import Reclaimer

SIZE = 4
WANTED = 4  # free blocks for a request to start


class TinyEngine:
    """Attributes:
    texts: what the running requests must hold, oldest first.
    waiting: new and preempted requests.
    donor: the next request to start shares the head of this one's row.
    totals: counts what has happened.
    """

    def __init__(self, options: ReplicaOptions, num_blocks: int, totals: Counter[str]) -> None:
        self.pool = SimplePool(num_blocks, SIZE)
        self.ranks = [Rank(i, num_blocks, SIZE) for i in range(2)]
        self.reclaimer = Reclaimer(options, SIZE, len(self.ranks), self.pool)
        self.reclaimer.audit = AuditTrail(keep=True)
        self.texts: dict[str, Shadow] = {}
        self.waiting: deque[str] = deque()
        self.donor: str | None = None
        self.totals = totals
        self.healthy = True
        self._options: dict[str, EvictionOptions] = {}
        self._prefill_end: dict[str, int] = {}
        self._ended: set[str] = set()
        self._plans: dict[str, RelocationPlan | None] = {}
        self._ids, self._payloads, self._now = count(1), count(1), 0

    # -- requests ------------------------------------------------------------------------------

    def arrive(self, options: EvictionOptions, num_tokens: int) -> None:
        request_id = f"r{next(self._ids)}"
        self._options[request_id], self._prefill_end[request_id] = options, num_tokens
        self.waiting.append(request_id)

    def preempt(self, request_id: str) -> None:
        """It comes back with all its tokens to compute again."""
        self._prefill_end[request_id] = self.texts[request_id].length
        self._leave(request_id, "preempted")
        self.waiting.appendleft(request_id)
        self.totals["preemptions"] += 1

    def finish(self, request_id: str) -> None:
        if request_id in self.texts:
            self._leave(request_id, "finished")
        else:
            self.waiting.remove(request_id)
        self.reclaimer.forget(request_id)
        self._ended.add(request_id)

    def _leave(self, request_id: str, cause: str) -> None:
        self.reclaimer.drop(request_id, cause)
        del self.pool.pending[request_id]
        self.pool.end(request_id)
        del self.texts[request_id]

    # -- one step ------------------------------------------------------------------------------

    def step(self, chunk: int, lag: int) -> None:
        self.healthy = False  # until this step has shown nothing wrong
        self._now += 1
        self.totals["steps"] += 1
        self._plans = {i: r.open_plan for i, r in self.reclaimer.requests.items()}
        self.reclaimer.begin_step(self._now, wanted=WANTED if self.waiting else 0)
        self._hear()
        growth = self._schedule(chunk)
        orders = self.reclaimer.end_step(blocked=bool(self.waiting))
        self.totals["fillings"] += len(orders.fillings)
        self._hear()
        self._check()
        for rank in self.ranks:
            rank.engine.lag = lag
            rank.execute(orders, self._ended, growth, self.texts)
        self._ended.clear()
        self.healthy = True

    def hear(self, rank: int, but: int = 0) -> None:
        """The reports of a rank arrive, all but the latest ``but``."""
        reports = self.ranks[rank].reports
        while len(reports) > but:
            self.reclaimer.report(reports.popleft())

    def _schedule(self, chunk: int) -> dict[str, Growth]:
        growth: dict[str, Growth] = {}
        for request_id in list(self.texts):
            if request_id in self.texts:
                self._grow(request_id, chunk, growth)
        if self.waiting and self.pool.num_free() >= WANTED:
            self._start(self.waiting.popleft(), chunk, growth)
        self.pool.owed = min(2, len(self.texts))
        self.pool.pending.clear()  # as in vLLM, lengths advance when the step is complete
        return growth

    def _start(self, request_id: str, chunk: int, growth: dict[str, Growth]) -> None:
        end, donor = self._prefill_end[request_id], self.texts.get(self.donor or "", Shadow(SIZE))
        num_shared = min(donor.shareable(), (end - 1) // SIZE)
        shared = self.pool.rows[self.donor][:num_shared] if num_shared else []
        self.texts[request_id] = donor.head(num_shared)
        self.pool.begin(request_id, shared, num_shared * SIZE)
        self._grow(request_id, chunk, growth)
        if request_id in growth:
            new = growth[request_id]
            growth[request_id] = Growth(True, shared + new.blocks, new.num_tokens)
            span = range(num_shared * SIZE, end)
            self.reclaimer.start(request_id, self._options[request_id], end, span)
            self.totals["shared blocks"] += num_shared

    def _grow(self, request_id: str, chunk: int, growth: dict[str, Growth]) -> None:
        """A chunk of a prefill or one token; the newest requests make room, itself the last."""
        text = self.texts[request_id]
        num_tokens = max(1, min(chunk, self._prefill_end[request_id] - text.length))
        if self._lacking(request_id, num_tokens) > 0:
            self.reclaimer.room.make(self._lacking(request_id, num_tokens))
            self._hear()
        while self._lacking(request_id, num_tokens) > 0:
            newest = list(self.texts)[-1]
            self.preempt(newest)
            growth.pop(newest, None)
            if newest == request_id:
                return
        new = self.pool.grow(request_id, num_tokens)
        self.pool.pending[request_id] = num_tokens
        for _ in range(num_tokens):
            text.append(next(self._payloads))
        growth[request_id] = Growth(False, new, num_tokens)

    def _lacking(self, request_id: str, num_tokens: int) -> int:
        return self.pool.missing(request_id, num_tokens) - self.pool.num_free()

    # -- checks --------------------------------------------------------------------------------

    def _check(self) -> None:
        open_plans = self.reclaimer.two_phase.open_plans.values()
        self.pool.check(sum(o.plan.destination_blocks.size for o in open_plans))
        for request_id, request in self.reclaimer.requests.items():
            self.texts[request_id].check(request.table)

    def check_clean(self) -> None:
        """Nothing is left of any request."""
        assert len(self.pool.free) == self.pool.total
        assert not self.reclaimer.requests and not self.reclaimer.two_phase.open_plans
        assert not self.reclaimer.totals
        for rank in self.ranks:
            assert not rank.rows and not rank.shard.tables and not rank.engine.copies

    def _hear(self) -> None:
        """Repeat on the shadows what the audit trail says has been done, in its order."""
        rows, self.reclaimer.audit.rows = self.reclaimer.audit.rows, []
        fillings = {filling.request_id: filling for filling in self.reclaimer.room.fillings}
        for row in rows:
            request_id = row["request_id"]
            plan = self._plans.get(request_id)
            if row["event"] == "evict":
                self.texts[request_id].evict(row["positions"].tolist())
            elif row["event"] == "reclaim" and plan and plan.plan_id in self.reclaimer._commits:
                self.texts[request_id].commit(plan)
                del self._plans[request_id]
            elif row["event"] == "reclaim":
                self.texts[request_id].fill(fillings[request_id])
