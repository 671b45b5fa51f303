# SPDX-License-Identifier: Apache-2.0
"""The sweep under a latency target and what is made of it, over engines that only calculate."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks import sla
from benchmarks.arms import Arm
from benchmarks.engine import Load

HOW = sla.Sweep([1000, 100])


class Calculated:
    """An arm whose p95 in seconds is a function of the concurrency."""

    def __init__(self, name: str, latency: Callable[[int], float]) -> None:
        self.name, self.latency = name, latency
        self.tried: list[int] = []

    def call(self, function: Any, load: Load, target: float | None = None) -> dict[str, Any]:
        if function is sla.run_load:
            return {}
        concurrency = load.num_requests
        self.tried.append(concurrency)
        p95 = self.latency(concurrency)
        meets = target is None or p95 <= target
        row = {"concurrency": concurrency, "meets": meets, "latency_p95_s": p95}
        return {**row, "tokens_per_s": concurrency * 100 / p95}


@pytest.fixture
def arms(monkeypatch: pytest.MonkeyPatch) -> dict[str, Calculated]:
    found = {
        "naive": Calculated("naive", lambda count: 10 if count <= 8 else 20),
        "vtoken": Calculated("vtoken", lambda count: 9 if count <= 13 else 11),
    }

    @contextmanager
    def side_by_side(_: list[Arm]) -> Iterator[dict[str, Calculated]]:
        yield found

    monkeypatch.setattr(sla, "side_by_side", side_by_side)
    return found


def test_the_best_that_meets_the_target_is_compared(arms: dict[str, Calculated]) -> None:
    rows = sla.measure([], [10, 12, 13, 14, 15], HOW, 3)
    assert {row["target"] for row in rows} == {10.5}
    summary = sla.summarise(rows, "random")
    assert summary["sla_concurrency_random"]["median"] == 13
    speedup = (13 * 100 / 9) / (8 * 100 / 10)
    assert summary["sla_speedup_random"]["median"] == pytest.approx(speedup, rel=1e-3)


def test_a_sweep_ends_at_its_first_miss_and_the_next_tries_the_best_two_again(
    arms: dict[str, Calculated],
) -> None:
    sla.measure([], [10, 12, 13, 14, 15], HOW, 2)
    assert arms["vtoken"].tried == [10, 12, 13, 14, 12, 13]
    assert arms["naive"].tried == [8, 9, 8]


def test_nothing_that_meets_the_target_is_no_throughput(arms: dict[str, Calculated]) -> None:
    arms["vtoken"].latency = lambda count: 11
    summary = sla.summarise(sla.measure([], [10, 12], HOW, 3), "h2o")
    assert summary["sla_speedup_h2o"]["median"] == 0 == summary["sla_concurrency_h2o"]["median"]


def test_to_the_end_nothing_is_left_out(arms: dict[str, Calculated]) -> None:
    sla.measure([], [10, 14, 13], sla.Sweep([1000, 100], to_the_end=True), 2)
    assert arms["vtoken"].tried == [10, 14, 13] * 2
    assert arms["naive"].tried == [8, 9] * 2


def test_medians_decide_when_chance_does() -> None:
    """One slow run of ours, and one lucky run of naive eviction, change nothing."""
    lucky = {("naive", 9, 1): 10.0, ("vtoken", 12, 0): 11.0, ("vtoken", 13, 2): 10.0}
    usual = {("naive", 8): 10.0, ("naive", 9): 11.0, ("vtoken", 12): 9.0, ("vtoken", 13): 10.6}
    rows = []
    for number in range(3):
        for (arm, concurrency), latency in usual.items():
            p95 = lucky.get((arm, concurrency, number), latency)
            row = {"round": number, "arm": arm, "concurrency": concurrency, "latency_p95_s": p95}
            rows.append(row | {"tokens_per_s": concurrency / p95})
    summary = sla.summarise(rows, "random")
    assert summary["sla_concurrency_random"]["median"] == 12
    assert summary["sla_speedup_random"] == {
        "median": round((12 / 9) / (8 / 10), 4),
        "min": round((12 / 11) / (8 / 10), 4),
        "max": round((12 / 9) / (8 / 10), 4),
    }
