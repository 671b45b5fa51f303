# SPDX-License-Identifier: Apache-2.0
"""What the exact model measures and evicts, on weights written by hand, against plain loops."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.quality.exact import Eviction, State
from vtoken.policy import Signal

# Layer, head, query, token. Four tokens so far; token 1 is evicted, tokens 2 and 3 are new.
LIVE = [True, False, True, True]
WEIGHTS = [
    [[[0.7, 0, 0.3, 0], [0.2, 0, 0.5, 0.3]], [[0.4, 0, 0.6, 0], [0.1, 0, 0.1, 0.8]]],
    [[[0.9, 0, 0.1, 0], [0.6, 0, 0.3, 0.1]], [[0.2, 0, 0.8, 0], [0.3, 0, 0.2, 0.5]]],
]
# Of each of the two new queries.
SEEN = [[0, 2], [0, 2, 3]]
# One more token, which sees all live ones.
NEXT = [[[[0.1, 0, 0.2, 0.3, 0.4]], [[0.4, 0, 0.2, 0.1, 0.3]]]] * 2

# Layer, KV head, token, channel.
KEYS = [
    [[[3, 4], [1, 0], [0, 2], [5, 0]], [[0, 1], [7, 7], [1, 1], [-1, 0]]],
    [[[1, 1], [0, -9], [2, 0], [0, 3]], [[6, 8], [1, 2], [-3, 4], [2, 2]]],
]


def state_of(policy: str, **options: float) -> State:
    state = State(Eviction(policy, **({"keep_ratio": 0.5, "sinks": 0, "recent": 0} | options)))
    state.live = torch.tensor(LIVE)
    layers = [SimpleNamespace(keys=torch.tensor(keys)[None].float()) for keys in KEYS]
    state.cache = SimpleNamespace(layers=layers)
    return state


def attentions(weights: list[list[list[list[float]]]]) -> list[torch.Tensor]:
    return [torch.tensor(layer)[None] for layer in weights]


def given(query: int, token: int, weights: list[list[list[list[float]]]] = WEIGHTS) -> float:
    """Attention of one query to one token: the mean over layers and heads."""
    found = [head[query][token] for layer in weights for head in layer]
    return sum(found) / len(found)


def norm(vector: list[float]) -> float:
    return math.sqrt(sum(x * x for x in vector))


def test_a_mass_is_all_attention_that_a_token_has_received() -> None:
    state = state_of("h2o")
    state.measure(attentions(WEIGHTS))
    mass = [given(0, n) + given(1, n) for n in range(4)]
    assert state.signals[Signal.ATTENTION_MASS] == pytest.approx(mass)
    state.live = torch.tensor([*LIVE, True])
    state.measure(attentions(NEXT))
    mass = [old + given(0, n, NEXT) for n, old in enumerate([*mass, 0.0])]
    assert state.signals[Signal.ATTENTION_MASS] == pytest.approx(mass)


@pytest.mark.parametrize(("window", "queries"), [(1, [1]), (2, [0, 1]), (32, [0, 1])])
def test_a_window_s_mass_is_the_mean_of_its_queries(window: int, queries: list[int]) -> None:
    state = state_of("snapkv", window=window)
    state.measure(attentions(WEIGHTS))
    expected = [sum(given(q, n) for q in queries) / len(queries) for n in range(4)]
    assert state.signals[Signal.WINDOW_MASS] == pytest.approx(expected)


def test_the_last_mass_is_what_the_newest_query_gives() -> None:
    state = state_of("tova")
    state.measure(attentions(WEIGHTS))
    expected = [given(1, n) for n in range(4)]
    assert state.signals[Signal.LAST_MASS] == pytest.approx(expected)


def test_low_is_less_than_an_equal_share_of_what_a_query_sees() -> None:
    """A query sees neither what is evicted nor what comes after it: nothing of it is low."""
    expected = [0.0] * 4
    for query, seen in enumerate(SEEN):
        for token in seen:
            shares = [head[query][token] for layer in WEIGHTS for head in layer]
            low = sum(share < 1 / len(seen) for share in shares)
            expected[token] += low / len(shares) / len(SEEN)
    assert expected == [0.625, 0.0, 0.625, 0.25], "by hand"
    found = state_of("scissorhands")._low(attentions(WEIGHTS))
    assert found.tolist() == pytest.approx(expected)


def test_similarity_is_the_cosine_with_the_mean_direction_of_live_keys() -> None:
    state = state_of("key_diff")
    state.measure(attentions(WEIGHTS))
    expected = [0.0] * 4
    for head in [head for layer in KEYS for head in layer]:
        units = [[x / norm(key) for x in key] for key in head]
        anchor = [sum(units[n][i] for n in range(4) if LIVE[n]) for i in range(2)]
        for n, unit in enumerate(units):
            dot = sum(a * b for a, b in zip(unit, anchor, strict=True))
            expected[n] += dot / norm(anchor) / 4
    assert state.signals[Signal.KEY_SIMILARITY] == pytest.approx(expected)


def test_a_key_s_norm_is_the_mean_over_layers_and_heads() -> None:
    state = state_of("key_norm")
    state.measure(attentions(WEIGHTS))
    expected = [sum(norm(head[n]) for layer in KEYS for head in layer) / 4 for n in range(4)]
    assert state.signals[Signal.KEY_NORM] == pytest.approx(expected)


def evicted(scores: list[float], dead: tuple[int, ...] = (), **options: float) -> set[int]:
    """Positions that TOVA, whose scores are its signal, takes from a text."""
    state = state_of("tova", **options)
    state.live = torch.tensor([n not in dead for n in range(len(scores))])
    before = state.live.clone()
    state.signals = {Signal.LAST_MASS: np.array(scores)}
    state.evict()
    return set(torch.nonzero(before & ~state.live).flatten().tolist())


def test_the_lowest_scores_go_until_the_ratio_is_kept() -> None:
    assert evicted([5, 1, 4, 2, 3, 0]) == {1, 3, 5}
    assert evicted([5, 1, 4, 2, 3, 0], keep_ratio=0.75) == {5}, "4.5 rounded up may live"


def test_what_is_evicted_already_counts_as_gone() -> None:
    assert evicted([5, 1, 4, 2, 3, 0], dead=(3, 5)) == {1}
    assert evicted([5, 1, 4, 2, 3, 0], dead=(1, 3, 5)) == set()


def test_sinks_and_recent_tokens_stay_however_low_they_score() -> None:
    assert evicted([0, 1, 5, 3, 4, 2], sinks=2, recent=1) == {2, 3, 4}
    assert evicted([0, 1, 5, 3, 4, 2], sinks=2, recent=2) == {2, 3}, "protection beats the ratio"


def test_of_equal_scores_the_earlier_token_goes() -> None:
    assert evicted([1, 1, 1, 1]) == {0, 1}


def test_a_heavy_hitter_outlives_a_token_that_is_seldom_looked_at() -> None:
    state = state_of("h2o")
    state.measure(attentions(WEIGHTS))
    state.evict()
    assert state.live.tolist() == [True, False, False, True]
