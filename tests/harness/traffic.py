"""Everything that can happen to a replica, as a Hypothesis state machine."""

from collections import Counter
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from vllm.v1.core.sched.interface import PauseState

from harness.machines import run_machine
from harness.replica import MAX_MODEL_LEN, Replica, Setting, prompt

LAGS = st.integers(0, 3)

SETTINGS = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([17, 20, 32]),
        "max_batched": st.sampled_from([16, 128, 300, 300]),
        "priority": st.booleans(),
        "caching": st.sampled_from([True, True, True, False]),
        "reserve": st.sampled_from([True, False, False]),
    }
)

REPLICA_OPTIONS = st.fixed_dictionaries(
    {
        "reclaim": st.sampled_from(["eager", "eager", "pressure", "adaptive"]),
        "theta_f": st.sampled_from([0, 0.25]),
        "batch_blocks": st.sampled_from([2, 64]),
        "low_water": st.sampled_from([0.05, 0.5]),
        "backend": st.sampled_from(["lazy_compaction"] * 8 + ["hole_filling", "whole_blocks"]),
    }
)

# Budgets of 256 and most ratios let a prompt be computed several blocks at a time.
LIMITS = st.sampled_from(
    [
        {"budget_tokens": 40},
        {"budget_tokens": 64},
        {"budget_tokens": 256},
        {"keep_ratio": 0.01},
        {"keep_ratio": 0.5},
        {"keep_ratio": 0.7},
    ]
)

EVICTION = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(["random", "random", "streaming_llm", "h2o", "key_norm"]),
        "seed": st.integers(0, 9),
        "tick_tokens": st.sampled_from([1, 4, 32]),
        "evict_after_tokens": st.sampled_from([0, 0, 0, 128]),
        "sinks": st.sampled_from([0, 4]),
        "recent": st.sampled_from([1, 8]),
    }
)

EVICTING = st.builds(lambda limit, eviction: limit | eviction, LIMITS, EVICTION)
OPTIONS = st.one_of(EVICTING, EVICTING, EVICTING, st.just({"policy": "keep_all"}))

PROMPTS = st.builds(
    prompt, st.integers(0, 3), st.one_of(st.integers(1, 160), st.integers(100, MAX_MODEL_LEN - 1))
)
MAX_TOKENS = st.integers(1, 160)


class Traffic(RuleBasedStateMachine):
    """One replica under arbitrary traffic.

    Attributes:
        depth: outputs in flight.
        totals: what has happened, over all examples.
    """

    depth: int
    totals: Counter[str]

    @initialize(setting=SETTINGS, vtoken=REPLICA_OPTIONS)
    def begin(self, setting: dict[str, Any], vtoken: dict[str, Any]) -> None:
        self.replica = Replica(Setting(depth=self.depth, vtoken=vtoken, **setting))
        self.ids: list[str] = []

    @rule(tokens=PROMPTS, max_tokens=MAX_TOKENS, options=OPTIONS)
    def arrive(self, tokens: list[int], max_tokens: int, options: dict[str, Any]) -> None:
        if len(self.replica.scheduler.waiting) < 8:
            self.ids.append(self.replica.arrive(tokens, max_tokens, **options))

    @rule(texts=st.lists(PROMPTS, min_size=2, max_size=5), options=EVICTING)
    def arrive_together(self, texts: list[list[int]], options: dict[str, Any]) -> None:
        for tokens in texts:
            self.arrive(tokens, 100, options)

    @rule(which=st.integers(0, 99), more=st.integers(1, 40), options=OPTIONS)
    def follow_up(self, which: int, more: int, options: dict[str, Any]) -> None:
        """Another turn of a conversation: the prompt is a whole earlier text and a little more."""
        texts = self.replica.finished
        if texts:
            self.arrive(texts[which % len(texts)] + prompt(1, more), 60, options)

    @rule(which=st.integers(0, 9))
    def abort(self, which: int) -> None:
        if self.ids:
            self.replica.abort(self.ids[-1 - which % len(self.ids)])

    @rule(which=st.integers(0, 9), tokens=PROMPTS, options=OPTIONS)
    def resubmit(self, which: int, tokens: list[int], options: dict[str, Any]) -> None:
        if self.ids:
            self.replica.resubmit(self.ids[-1 - which % len(self.ids)], tokens, 60, **options)

    @rule(running=st.booleans())
    def reset(self, running: bool) -> None:
        self.replica.reset(running)

    @rule(state=st.sampled_from(PauseState))
    def pause(self, state: PauseState) -> None:
        """Paused, an engine sends steps without tokens, or none at all."""
        self.replica.scheduler.set_pause_state(state)

    @rule()
    def unpause(self) -> None:
        self.pause(PauseState.UNPAUSED)

    @rule()
    def reclaim_now(self) -> None:
        self.replica.scheduler.reclaimer.reclaim_now()

    @rule(corrupts=st.booleans())
    def copies_go_wrong(self, corrupts: bool) -> None:
        self.replica.worker.engine.corrupts = corrupts

    @rule(lag=LAGS)
    def schedule(self, lag: int) -> None:
        self.replica.schedule(lag)

    @rule()
    def process(self) -> None:
        self.replica.process()

    @rule(steps=st.integers(8, 60), lag=LAGS)
    def run(self, steps: int, lag: int) -> None:
        """The engine at full depth for a while."""
        for _ in range(steps):
            self.replica.schedule(lag)
        self.replica.scheduler.vtoken_status()

    @rule(steps=st.integers(8, 60), lag=LAGS)
    def run_more(self, steps: int, lag: int) -> None:
        self.run(steps, lag)

    def teardown(self) -> None:
        if not hasattr(self, "replica") or not self.replica.healthy:
            return
        replica, stats = self.replica, self.replica.scheduler.reclaimer.stats
        replica.worker.engine.corrupts = False
        replica.scheduler.set_pause_state(PauseState.UNPAUSED)
        for request in list(replica.scheduler.waiting)[4:]:
            replica.abort(request.request_id)
        replica.run_to_the_end()
        replica.check_clean()
        self.totals.update(replica.counts)
        self.totals["commits"] += stats.plans_committed
        self.totals["fillings"] += stats.holes_filled
        self.totals["preemptions"] += replica.scheduler.num_preemptions
        self.totals["measured"] += replica.worker.probe.num_measured
        self.totals["forwards checked"] += replica.worker.oracle.num_checked
        self.totals["tokens not seen"] += replica.worker.oracle.num_invisible
        for reason, count in stats.plans_aborted.items():
            self.totals[f"plans {reason}"] += count


def run_traffic(
    depth: int, wanted: dict[str, int], max_rounds: int = 40, totals: Counter[str] | None = None
) -> Counter[str]:
    """Run the machine with seed after seed until enough has happened.

    Args:
        totals: where it is counted, if a test counts things of its own.

    Raises:
        AssertionError: what a run finds, or that ``wanted`` was not reached.
    """
    totals = Counter() if totals is None else totals
    machine = type(f"TrafficAtDepth{depth}", (Traffic,), {"depth": depth, "totals": totals})
    for number in range(max_rounds):
        run_machine(machine, number, max_examples=10, num_steps=40)
        if all(totals[what] >= count for what, count in wanted.items()):
            return totals
    raise AssertionError(f"wanted {wanted}, but only {dict(totals)} happened")
