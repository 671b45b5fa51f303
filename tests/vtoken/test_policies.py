"""What every policy in the registry promises. A new one is found here by itself."""

import numpy as np
import pytest

from harness.tables import SIZE, make_request
from vtoken.options import EvictionOptions
from vtoken.policies import POLICIES
from vtoken.policy import TokenView
from vtoken.request import EvictingRequest

LENGTHS = [1, 2, 63, 64, 65, 1000, 100_000]
EVICTING = sorted(set(POLICIES) - {"keep_all"})


def ticked(policy: str, length: int, **options: object) -> EvictingRequest:
    """A request of that length after one run of its policy."""
    wanted = {
        "policy": policy,
        "budget_tokens": 64,
        "sinks": 4,
        "recent": 8,
        "evict_after_tokens": 0,
        **options,
    }
    request = make_request(0, **wanted)
    request.tick(range(-(-length // SIZE)), length)
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
@pytest.mark.parametrize("policy", POLICIES)
def test_scores_do_not_depend_on_the_order_of_the_view(policy: str, length: int) -> None:
    positions = np.arange(length, dtype=np.int32)
    order = np.random.default_rng(1).permutation(length)
    scorer = EvictionOptions(policy=policy, budget_tokens=1).make_policy()
    scores = scorer.score(TokenView(positions, length, 5))
    assert scores.shape == (length,) and scores.dtype == np.float64
    shuffled = scorer.score(TokenView(positions[order], length, 5))
    assert np.array_equal(scores[order], shuffled)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("policy", EVICTING)
def test_the_tokens_kept_are_those_scored_highest(policy: str, length: int) -> None:
    request = ticked(policy, length)
    positions = np.arange(length, dtype=np.int32)
    scores = request.policy.score(TokenView(positions, length, 0))
    free = set(range(4, length - 8))
    dead = free - kept(request)
    alive = free & kept(request)
    assert not dead or not alive or max(scores[list(dead)]) <= min(scores[list(alive)])


@pytest.mark.parametrize("policy", EVICTING)
def test_ticking_often_keeps_what_ticking_once_keeps(policy: str) -> None:
    """No policy here looks at what it evicted before: the outcome depends on the length."""
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
    request.tick(range(75), 300)
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


def test_keep_all_evicts_nothing() -> None:
    assert not EvictionOptions(policy="keep_all").evicts
