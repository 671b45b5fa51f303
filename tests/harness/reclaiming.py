"""vToken's reclaimer and two shards under arbitrary orders, as a Hypothesis state machine."""

from collections import Counter
from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from harness.machines import run_machine
from harness.tables import kill
from harness.tiny_engine import TinyEngine
from vtoken import planner
from vtoken.options import EvictionOptions, ReplicaOptions

WHICH = st.integers(0, 9)
LATE = st.integers(0, 2)
RANKS = st.integers(0, 1)

REPLICA = st.builds(
    ReplicaOptions,
    reclaim=st.sampled_from(["eager", "pressure", "adaptive"]),
    theta_f=st.sampled_from([0, 0.25]),
    low_water=st.sampled_from([0.05, 0.6]),
    batch_blocks=st.sampled_from([2, 64]),
    backend=st.sampled_from(["lazy_compaction"] * 5 + ["hole_filling", "whole_blocks"]),
    probe=st.just(True),
    probe_queries=st.just(4),
)
EVICTION = st.builds(
    EvictionOptions,
    policy=st.sampled_from(["random", "random", "streaming_llm", "h2o"]),
    seed=st.integers(0, 9),
    budget_tokens=st.sampled_from([4, 8, 12]),
    tick_tokens=st.sampled_from([1, 4, 8]),
    evict_after_tokens=st.sampled_from([0, 12]),
    sinks=st.sampled_from([0, 2]),
    recent=st.integers(1, 3),
)


class Reclaiming(RuleBasedStateMachine):
    """``totals`` counts what has happened, over all examples."""

    totals: Counter[str]

    @initialize(options=REPLICA, num_blocks=st.sampled_from([10, 14, 24]))
    def begin(self, options: ReplicaOptions, num_blocks: int) -> None:
        self.engine = TinyEngine(options, num_blocks, self.totals)

    @rule(options=EVICTION, num_tokens=st.integers(1, 40), share=st.booleans(), which=WHICH)
    def arrive(self, options: EvictionOptions, num_tokens: int, share: bool, which: int) -> None:
        if len(self.engine.waiting) < 4:
            self.engine.arrive(options, num_tokens)
            self.engine.donor = self._running(which) if share else None

    @rule(steps=st.integers(1, 20), chunk=st.integers(1, 12), lag=LATE, late=LATE)
    def run(self, steps: int, chunk: int, lag: int, late: int) -> None:
        """The ``lag`` latest copies are always on their way, and ``late`` reports."""
        for _ in range(steps):
            self.engine.step(chunk, lag)
            for rank in range(len(self.engine.ranks)):
                self.engine.hear(rank, but=late)

    @rule(chunk=st.integers(1, 12), lag=LATE)
    def step(self, chunk: int, lag: int) -> None:
        self.engine.step(chunk, lag)

    @rule(rank=RANKS)
    def hear(self, rank: int) -> None:
        """One rank has voted, the other may not have."""
        self.engine.hear(rank)

    @rule(which=WHICH, position=st.integers(0, 60))
    def evict(self, which: int, position: int) -> None:
        """A token dies at a moment that no policy would choose."""
        reclaimer = self.engine.reclaimer
        request = reclaimer.requests.get(self._running(which) or "")
        if request is not None and position < request.table.length:
            text = self.engine.texts[request.request_id]
            if position in text.live:
                kill(request.table, position)
                text.evict([position])
                reclaimer.planner.note(request)

    @rule(which=WHICH)
    def preempt(self, which: int) -> None:
        if request_id := self._running(which):
            self.engine.preempt(request_id)

    @rule(which=WHICH)
    def finish(self, which: int) -> None:
        if request_id := self._running(which):
            self.engine.finish(request_id)

    @rule()
    def reclaim_now(self) -> None:
        self.engine.reclaimer.reclaim_now()

    @rule(rank=RANKS, how=st.sampled_from(["refuses", "lies", "garbles"]))
    def go_astray(self, rank: int, how: str) -> None:
        setattr(self.engine.ranks[rank], how, True)

    def teardown(self) -> None:
        if not hasattr(self, "engine") or not self.engine.healthy:
            return
        for request_id in [*self.engine.texts, *self.engine.waiting]:
            self.engine.finish(request_id)
        self.engine.step(1, 0)
        self.engine.check_clean()
        stats = self.engine.reclaimer.stats
        self.totals["commits"] += stats.plans_committed
        self.totals["aborts"] += stats.plans_aborted.total()
        for reason, number in stats.plans_aborted.items():
            self.totals[f"plans {reason}"] += number

    def _running(self, which: int) -> str | None:
        ids = list(self.engine.texts)
        return ids[which % len(ids)] if ids else None


def run_reclaiming(wanted: dict[str, int], max_rounds: int = 40) -> Counter[str]:
    """Run the machine with seed after seed until enough has happened; the same every time.

    Raises:
        AssertionError: what a run finds, or that ``wanted`` was not reached.
    """
    totals: Counter[str] = Counter()
    machine = type("ReclaimingMachine", (Reclaiming,), {"totals": totals})
    for number in range(max_rounds):
        with patch.object(planner, "PLAN_COST", 8):  # texts this short never read 4,096 in vain
            run_machine(machine, number, max_examples=20, num_steps=50)
        if all(totals[what] >= enough for what, enough in wanted.items()):
            return totals
    raise AssertionError(f"wanted {wanted}, but only {dict(totals)} happened")
