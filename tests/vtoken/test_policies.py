"""What every registered policy promises, those of entry points too. A new one is found here."""

import inspect
from pathlib import Path

import numpy as np
import pytest

from harness.tables import SIZE, make_request
from vtoken.options import EvictionOptions
from vtoken.policies import POLICIES
from vtoken.policies.random import Random
from vtoken.policy import Scores, TokenView, make_policy, policy_names
from vtoken.request import EvictingRequest
from vtoken.signals import Observation, Probe, Signal

LENGTHS = [1, 2, 63, 64, 65, 1000, 100_000]
EVICTING = [name for name in policy_names() if name != "keep_all"]
BLIND = [name for name in EVICTING if not make_policy(name, 0, 4).signals]
SEEING = sorted(set(EVICTING) - set(BLIND))
OURS = sorted(set(POLICIES) - {"keep_all"})


def observe(request: EvictingRequest, length: int, seed: int = 3) -> None:
    """Measure its resident tokens: anything, the same for the same seed and length."""
    probe = Probe("r", 1, request.table.epoch, length, 1, request.measures)
    numbers = np.random.default_rng(seed).random((len(request.measures), length), np.float32)
    positions = request.table.positions.copy()
    request.signals.add(Observation(probe, positions, numbers[:, positions]))


def ticked(policy: str, length: int, **options: object) -> EvictingRequest:
    """A request of that length after one run of its policy, with signals if it wants any."""
    wanted = {
        "policy": policy,
        "budget_tokens": 64,
        "sinks": 4,
        "recent": 8,
        "evict_after_tokens": 0,
        **options,
    }
    request = make_request(0, **wanted)
    request.table.sync_new_tokens(range(-(-length // SIZE)), length)
    observe(request, length)
    request.tick((), length)
    return request


def kept(request: EvictingRequest) -> set[int]:
    return set(request.table.positions[request.table.live].tolist())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("policy", EVICTING)
def test_budget_is_met_exactly(policy: str, length: int) -> None:
    request = ticked(policy, length)
    assert request.table.num_live == min(length, 64)
    request.table.check()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("policy", EVICTING)
def test_protected_tokens_are_kept(policy: str, length: int) -> None:
    protected = {p for p in range(length) if p < 4 or p >= length - 8}
    assert protected <= kept(ticked(policy, length))


@pytest.mark.parametrize("policy", EVICTING)
def test_protection_beats_the_budget(policy: str) -> None:
    request = ticked(policy, 200, recent=100)
    assert kept(request) == {*range(4), *range(100, 200)}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("policy", EVICTING)
def test_the_same_seed_keeps_the_same_tokens(policy: str, length: int) -> None:
    assert kept(ticked(policy, length, seed=7)) == kept(ticked(policy, length, seed=7))


def test_another_seed_keeps_another_sample() -> None:
    assert kept(ticked("random", 1000, seed=7)) != kept(ticked("random", 1000, seed=8))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("policy", policy_names())
def test_scores_do_not_depend_on_the_order_of_the_view(policy: str, length: int) -> None:
    positions = np.arange(length, dtype=np.int32)
    order = np.random.default_rng(1).permutation(length)
    scorer = EvictionOptions(policy=policy, budget_tokens=1).scorer
    numbers = np.random.default_rng(2).random(length)
    signals = {signal: numbers * (2 + i) for i, signal in enumerate(sorted(scorer.signals))}
    scores = scorer.score(TokenView(positions, length, 5, 64, signals))
    assert scores.shape == (length,) and scores.dtype == np.float64
    mixed = {signal: values[order] for signal, values in signals.items()}
    shuffled = scorer.score(TokenView(positions[order], length, 5, 64, mixed))
    assert np.array_equal(scores[order], shuffled)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("policy", EVICTING)
def test_the_tokens_kept_are_those_scored_highest(policy: str, length: int) -> None:
    request = ticked(policy, length)
    positions = np.arange(length, dtype=np.int32)
    signals = request.signals.of(positions)
    scores = request.policy.score(TokenView(positions, length, 0, 64, signals))
    free = set(range(4, length - 8))
    dead = free - kept(request)
    alive = free & kept(request)
    assert not dead or not alive or max(scores[list(dead)]) <= min(scores[list(alive)])


@pytest.mark.parametrize("policy", BLIND)
def test_ticking_often_keeps_what_ticking_once_keeps(policy: str) -> None:
    """Policies without signals do not look at what they evicted before: only length counts."""
    often = ticked(policy, 16)
    for length in range(17, 401):
        new = [length // SIZE] if length % SIZE == 1 else []
        often.tick(new, length)
    assert kept(often) == kept(ticked(policy, 400))


@pytest.mark.parametrize("policy", EVICTING)
def test_short_requests_are_never_evicted_from(policy: str) -> None:
    assert ticked(policy, 127, evict_after_tokens=128).table.num_live == 127
    assert ticked(policy, 128, evict_after_tokens=128).table.num_live == 64


@pytest.mark.parametrize("policy", EVICTING)
def test_a_protected_prompt_is_kept_whole(policy: str) -> None:
    request = make_request(0, policy=policy, protect_prompt=True, recent=8, evict_after_tokens=0)
    request.num_prompt_tokens = 100
    request.table.sync_new_tokens(range(75), 300)
    observe(request, 300)
    request.tick((), 300)
    assert kept(request) == {*range(100), *range(292, 300)}


def test_streaming_keeps_sinks_and_a_window() -> None:
    assert kept(ticked("streaming_llm", 1000)) == {*range(4), *range(940, 1000)}


def test_random_survivors_are_a_uniform_sample() -> None:
    """Half of the survivors come from each half of the text, on average over many seeds."""
    late = [
        len({p for p in kept(ticked("random", 1000, seed=seed)) if 4 <= p < 498})
        for seed in range(200)
    ]
    # 52 survivors among 988 places, 494 of them in this half: mean 26, standard error 0.25.
    assert abs(np.mean(late) - 26) < 1


@pytest.mark.parametrize("policy", SEEING)
def test_a_measurement_decides_about_the_moment_it_was_made(policy: str) -> None:
    """Tokens that came since then stay, and cost no older one its place."""
    request = make_request(0, policy=policy, sinks=4, recent=8, evict_after_tokens=0)
    request.table.sync_new_tokens(range(25), 100)
    observe(request, 100)
    request.tick(range(25, 75), 300)
    assert kept(request) == kept(ticked(policy, 100)) | {*range(100, 300)}


@pytest.mark.parametrize("policy", SEEING)
def test_when_blocks_are_short_all_but_what_was_never_measured_can_go(policy: str) -> None:
    """However small its signal of 0 may be, and although the budget is exceeded."""
    request = ticked(policy, 100)
    request.table.sync_new_tokens(range(25, 75), 300)
    assert request.excess(300) == 64
    request.tick((), 300, short=True)
    assert kept(request) == {*range(4), *range(100, 300)}


@pytest.mark.parametrize("policy", SEEING)
def test_a_policy_without_a_measurement_evicts_nothing(policy: str) -> None:
    request = make_request(200, policy=policy, recent=8, evict_after_tokens=0)
    assert request.excess(200) == 0
    assert request.tick((), 200).size == 0


@pytest.mark.parametrize("policy", OURS)
def test_a_file_has_at_most_50_lines_and_says_where_the_idea_is_from(policy: str) -> None:
    factory = POLICIES[policy]
    source = Path(inspect.getfile(factory)).read_text()
    assert len(source.splitlines()) <= 50
    assert "arXiv" in factory.__doc__ and "Knobs" in factory.__doc__


def scores_of(policy: str, budget: int = 4, **signals: list[float]) -> list[float]:
    """Scores of tokens 0, 1, 2, ... with these signals."""
    arrays = {Signal(name): np.array(values) for name, values in signals.items()}
    (size,) = {array.size for array in arrays.values()}
    scorer = EvictionOptions(policy=policy, budget_tokens=budget).scorer
    assert scorer.signals == set(arrays)
    view = TokenView(np.arange(size, dtype=np.int32), size, 0, budget, arrays)
    return scorer.score(view).tolist()


def test_h2o_keeps_heavy_hitters_and_half_of_the_budget_of_latest_tokens() -> None:
    scores = scores_of("h2o", attention_mass=[3.0, 9.0, 1.0, 0.5, 0.0, 0.0])
    assert scores == [3.0, 9.0, 1.0, 0.5, np.inf, np.inf]


def test_scissorhands_keeps_what_was_seldom_below_the_average() -> None:
    assert scores_of("scissorhands", low_share=[0.0, 7.5, 3.0]) == [0.0, -7.5, -3.0]


def test_tova_keeps_what_the_latest_query_looks_at() -> None:
    assert scores_of("tova", last_mass=[0.5, 0.25, 0.25]) == [0.5, 0.25, 0.25]


def test_snapkv_spreads_the_window_s_attention_over_neighbours() -> None:
    scores = scores_of("snapkv", window_mass=[0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    assert np.allclose(scores, [0, 1 / 4, 1 / 5, 1 / 5, 1 / 5, 1 / 4, 0])


def test_snapkv_s_neighbours_are_those_of_the_text() -> None:
    """Not those of the view, where far tokens meet once others have gone."""
    positions = np.array([4000, 7, 2, 4001], np.int32)
    mass = np.array([0.0, 1.0, 3.0, 4.0])
    view = TokenView(positions, 5000, 0, 4, {Signal.WINDOW_MASS: mass})
    scores = EvictionOptions(policy="snapkv", budget_tokens=4).scorer.score(view)
    assert scores.tolist() == [2.0, 1.0, 3.0, 2.0]


class HalfUnsure(Random):
    """Knows nothing about every second token."""

    def score(self, view: TokenView) -> Scores:
        return np.where(view.positions % 2, np.nan, super().score(view))


def test_a_score_that_is_not_a_number_keeps_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "half_unsure", HalfUnsure)
    request = ticked("half_unsure", 400)
    assert set(range(1, 400, 2)) <= kept(request)
    assert request.table.num_live > 64 and request.exceeds_its_cap
    assert request.totals.scores_nan == 200
    fine = ticked("half_unsure", 400, budget_tokens=300)
    assert fine.table.num_live == 300 and not fine.exceeds_its_cap


def test_key_policies_keep_small_keys_and_keys_unlike_the_others() -> None:
    assert scores_of("key_norm", key_norm=[2.0, 1.0]) == [-2.0, -1.0]
    assert scores_of("key_diff", key_similarity=[0.9, -0.1]) == [-0.9, 0.1]


def test_keep_all_evicts_nothing() -> None:
    assert not EvictionOptions(policy="keep_all").evicts
