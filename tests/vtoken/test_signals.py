"""Signals by position, against a model made of plain dicts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.signals import Measure, Observation, Probe, Signal, SignalStore, measures_for

# (tokens that are new, which of the resident ones have left, what is measured comes from this seed)
ROUNDS = st.lists(
    st.tuples(st.integers(1, 40), st.sets(st.integers(0, 200), max_size=10), st.integers(0, 9)),
    min_size=1,
    max_size=6,
)


@given(rounds=ROUNDS)
def test_signals_are_what_a_plain_dict_says(rounds: list[tuple[int, set[int], int]]) -> None:
    store = SignalStore(frozenset(Signal))
    measures = measures_for(store.signals)
    model: dict[Signal, dict[int, float]] = {signal: {} for signal in Signal}
    resident: list[int] = []
    length = 0
    for new, leaves, seed in rounds:
        before, length = length, length + new
        resident = [p for p in [*resident, *range(before, length)] if p not in leaves]
        values = np.random.default_rng(seed).random((len(measures), len(resident)), np.float32)
        probe = Probe("r", 1, 0, length, 1 + seed, measures)
        store.add(Observation(probe, np.array(resident, np.int32), values))
        measured = dict(zip(measures, values.astype(np.float64), strict=True))
        for i, p in enumerate(resident):
            # Of the 1 + seed queries looked at, so many could see it.
            share = min(1 + seed, length - p) / (1 + seed)
            queries = min(length - before, length - p) / share
            old = model[Signal.ATTENTION_MASS].get(p, 0.0)
            new_mass = queries * measured[Measure.MEAN_MASS][i]
            model[Signal.ATTENTION_MASS][p] = old + new_mass
            model[Signal.LOW_SHARE][p] = measured[Measure.LOW_SHARE][i]
            model[Signal.WINDOW_MASS][p] = measured[Measure.MEAN_MASS][i]
            model[Signal.LAST_MASS][p] = measured[Measure.LAST_MASS][i]
            model[Signal.KEY_NORM][p] = measured[Measure.KEY_NORM][i]
            model[Signal.KEY_SIMILARITY][p] = measured[Measure.KEY_SIMILARITY][i]
    positions = np.arange(length + 5, dtype=np.int32)
    for signal, values in store.of(positions).items():
        expected = [model[signal].get(p, 0.0) for p in positions.tolist()]
        assert np.allclose(values, expected, rtol=1e-5)
    assert store.observed == length


@pytest.mark.parametrize("signal", Signal)
def test_only_what_is_declared_is_measured(signal: Signal) -> None:
    (measure,) = measures_for(frozenset({signal}))
    store = SignalStore(frozenset({signal}))
    probe = Probe("r", 1, 0, 2, 1, (measure,))
    store.add(Observation(probe, np.array([0, 1], np.int32), np.ones((1, 2), np.float32)))
    assert set(store.of(np.array([1], np.int32))) == {signal}


def test_two_signals_from_one_measurement_ask_for_it_once() -> None:
    wanted = frozenset({Signal.ATTENTION_MASS, Signal.WINDOW_MASS})
    assert measures_for(wanted) == (Measure.MEAN_MASS,)


def test_a_mass_is_the_sum_over_all_queries_if_all_are_looked_at() -> None:
    """8 tokens, all 8 queries known: the newest token is seen by one query only."""
    attention = np.tril(np.random.default_rng(0).random((8, 8)))
    attention /= attention.sum(1, keepdims=True)
    store = SignalStore(frozenset({Signal.ATTENTION_MASS}))
    probe = Probe("r", 1, 0, 8, 8, (Measure.MEAN_MASS,))
    positions = np.arange(8, dtype=np.int32)
    mean = attention.mean(0, keepdims=True).astype(np.float32)
    store.add(Observation(probe, positions, mean))
    assert np.allclose(store.of(positions)[Signal.ATTENTION_MASS], attention.sum(0), rtol=1e-5)
