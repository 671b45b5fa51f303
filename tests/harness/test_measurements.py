"""What is measured of a request, and when, on the real scheduler with a fake worker."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from harness.observing import observations_of
from harness.replica import Replica, prompt
from harness.scenes import step_until
from vtoken.plan import NO_ORDERS
from vtoken.signals import Probe

Make = Callable[..., Replica]

WINDOW = 8  # the harness's probe_queries
H2O = {"policy": "h2o", "budget_tokens": 64, "sinks": 0, "recent": 1, "evict_after_tokens": 0}


class Steps:
    """Reads each output as a worker would.

    Attributes:
        computed: tokens that the present row of each request has computed.
        probes: every order to measure, with what had been computed by then.
    """

    def __init__(self, replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
        self.computed: Counter[str] = Counter()
        self.probes: list[tuple[Probe, int]] = []
        self.execute = replica.worker.execute
        monkeypatch.setattr(replica.worker, "execute", self.read)

    def read(self, output: Any) -> Any:
        for request_id in output.preempted_req_ids or ():
            del self.computed[request_id]
        self.computed.update(output.num_scheduled_tokens)
        for probe in getattr(output, "vtoken", NO_ORDERS).probes:
            self.probes.append((probe, self.computed[probe.request_id]))
        return self.execute(output)

    def lengths(self, request_id: str) -> list[int]:
        return [probe.length for probe, _ in self.probes if probe.request_id == request_id]


def test_tokens_from_the_prefix_cache_have_no_queries(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 of the second prompt's 260 tokens are hits: this row has computed 4 queries."""
    replica = make(num_blocks=40)
    replica.arrive(prompt(0, 260), 2)
    replica.run_to_the_end()
    steps = Steps(replica, monkeypatch)
    replica.arrive(prompt(0, 260), 40, **H2O, tick_tokens=2)
    replica.run_to_the_end()
    assert replica.counts["prefix hits"] == 1
    queries = {probe.length: probe.num_queries for probe, _ in steps.probes}
    assert [queries[length] for length in (260, 262, 264, 266)] == [4, 6, 8, 8]


@pytest.mark.parametrize(("policy", "num_queries"), [("tova", 1), ("snapkv", WINDOW)])
def test_a_policy_that_looks_at_the_newest_query_has_no_others_measured(
    make: Make, monkeypatch: pytest.MonkeyPatch, policy: str, num_queries: int
) -> None:
    replica = make(num_blocks=40)
    steps = Steps(replica, monkeypatch)
    replica.arrive(prompt(0, 260), 40, **(H2O | {"policy": policy}), tick_tokens=4)
    replica.run_to_the_end()
    assert {probe.num_queries for probe, _ in steps.probes} == {num_queries}


def test_no_row_is_asked_for_more_queries_than_it_has_computed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that share all but their last 3 tokens, some of them preempted and computed again."""
    replica = make(num_blocks=40)
    steps = Steps(replica, monkeypatch)
    for i in range(8):
        replica.arrive(prompt(i % 2, 300), 4)
        for _ in range(8):
            replica.schedule()
        replica.arrive(prompt(i % 2, 67 + 32 * (i % 7)), 40, **H2O, tick_tokens=3)
        for _ in range(8):
            replica.schedule()
        if i % 4 == 3:
            replica.reset(running=True)
    replica.run_to_the_end()
    assert replica.counts["prefix hits"] >= 3 and replica.counts["resumed"] >= 3
    for probe, computed in steps.probes:
        assert probe.num_queries == min(WINDOW, computed)
    assert any(computed < WINDOW < probe.length for probe, computed in steps.probes)


@pytest.mark.parametrize("tick_tokens", [1, 7, 10])
def test_a_decoding_request_is_measured_every_tick(
    make: Make, monkeypatch: pytest.MonkeyPatch, tick_tokens: int
) -> None:
    replica = make(num_blocks=40)
    steps = Steps(replica, monkeypatch)
    replica.arrive(prompt(0, 50), 40, **H2O, tick_tokens=tick_tokens)
    replica.run_to_the_end()
    # The last of 40 tokens is sampled and never computed.
    assert steps.lengths("r1") == list(range(50, 50 + 40, tick_tokens))


def test_a_prompt_in_chunks_is_measured_after_each(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = make(num_blocks=40, max_batched=100)
    steps = Steps(replica, monkeypatch)
    options = H2O | {"budget_tokens": 512}  # fits, so only the batch cuts it into chunks
    replica.arrive(prompt(0, 330), 30, **options, tick_tokens=10)
    replica.run_to_the_end()
    assert steps.lengths("r1") == [100, 200, 300, 330, 340, 350]


def test_an_answer_about_another_incarnation_is_ignored(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """r1 is preempted and begins anew while what was measured before is on its way."""
    replica = make(num_blocks=40)
    found = observations_of(replica.scheduler.reclaimer.policy_runs, monkeypatch)
    replica.arrive(prompt(0, 120), 60, **H2O)
    replica.schedule()
    replica.reset(running=True)
    replica.schedule()
    request = replica.scheduler.reclaimer.requests["r1"]
    assert request.incarnation == 2 and not found
    replica.process()
    assert [observation.probe.incarnation for observation in found] == [1]
    assert request.signals.observed == 0
    step_until(replica, lambda: len(found) > 1)
    assert found[1].probe.incarnation == 2
    assert request.signals.observed == found[1].probe.length
