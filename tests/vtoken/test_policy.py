"""Choosing victims: budget, protection and ties, whatever the policy."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.errors import OptionError, PolicyError
from vtoken.policies import POLICIES
from vtoken.policy import (
    TokenView,
    checked_scores,
    choose_victims,
    make_policy,
    protected_mask,
)

TOKENS = st.lists(
    # Few scores, so that ties are common; infinity is a score as well.
    st.tuples(st.sampled_from([0.0, 1.0, 2.5, np.inf, -np.inf]), st.booleans()),
    max_size=12,
)


def view_of(positions: list[int], length: int | None = None, num_prompt: int = 0) -> TokenView:
    array = np.array(positions, np.int32)
    return TokenView(
        array, max(positions, default=-1) + 1 if length is None else length, num_prompt
    )


@given(tokens=TOKENS, num_victims=st.integers(-1, 14), random=st.randoms(use_true_random=False))
def test_exactly_the_lowest_scores_that_are_not_protected_die(
    tokens: list[tuple[float, bool]], num_victims: int, random: Any
) -> None:
    positions = list(range(len(tokens)))
    random.shuffle(positions)
    scores = np.array([score for score, _ in tokens], np.float64)
    protected = np.array([keep for _, keep in tokens], np.bool_)
    ranked = sorted((scores[i], positions[i]) for i in range(len(tokens)) if not protected[i])
    rows = choose_victims(view_of(positions), scores, protected, num_victims)
    chosen = {positions[row] for row in rows}
    assert len(chosen) == rows.size
    assert chosen == {position for _, position in ranked[: max(num_victims, 0)]}


@pytest.mark.parametrize(
    ("sinks", "recent", "prompt", "kept"),
    [
        (0, 1, False, {9}),
        (2, 3, False, {0, 1, 7, 8, 9}),
        (2, 3, True, {0, 1, 2, 3, 4, 7, 8, 9}),
        (7, 1, True, {0, 1, 2, 3, 4, 5, 6, 9}),
        (100, 100, False, set(range(10))),
    ],
)
def test_sinks_recent_tokens_and_if_wanted_the_prompt_are_protected(
    sinks: int, recent: int, prompt: bool, kept: set[int]
) -> None:
    view = view_of(list(range(10)), num_prompt=5)
    mask = protected_mask(view, sinks, recent, prompt)
    assert set(np.flatnonzero(mask).tolist()) == kept


def test_protection_goes_by_position_not_by_place_in_the_view() -> None:
    view = view_of([9, 0, 5, 3], length=10)
    assert protected_mask(view, 1, 1, False).tolist() == [True, True, False, False]


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(
        OptionError, match="`policy`='h3o' is unknown; choose one of: h2o, keep_all, "
    ):
        make_policy("h3o", seed=0, sinks=4)


@pytest.mark.parametrize(
    ("scores", "reason"),
    [(np.zeros(3), "scored"), (np.zeros((4, 1)), "scored")],
)
def test_scores_that_cannot_be_ranked_are_refused(scores: np.ndarray, reason: str) -> None:
    class Broken:
        num_protected = 0

        def score(self, view: TokenView) -> np.ndarray:
            return scores

    with pytest.raises(PolicyError, match=reason):
        checked_scores(Broken(), view_of([0, 1, 2, 3]))


class Raising:
    num_protected = 0

    def score(self, view: TokenView) -> np.ndarray:
        raise KeyError("layer 7")


class Wordy:
    num_protected = 0

    def score(self, view: TokenView) -> list[str]:
        return ["high"] * view.positions.size


@pytest.mark.parametrize(("policy", "cause"), [(Raising(), "layer 7"), (Wordy(), "high")])
def test_whatever_a_policy_raises_is_a_policy_error(policy: Any, cause: str) -> None:
    with pytest.raises(PolicyError, match=cause):
        checked_scores(policy, view_of([0, 1, 2, 3]))


def test_a_policy_that_cannot_be_made_is_an_option_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(seed: int, sinks: int) -> None:
        raise FileNotFoundError("weights.bin")

    monkeypatch.setitem(POLICIES, "learned", broken)
    with pytest.raises(OptionError, match=r"`policy`='learned' cannot be made: .*weights.bin"):
        make_policy("learned", seed=0, sinks=4)


class Point:
    """An installed package's entry point."""

    name = "theirs"

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def load(self) -> Any:
        if isinstance(self.policy, Exception):
            raise self.policy
        return self.policy


class Shy:
    signals = frozenset[str]()

    def __init__(self, seed: int, sinks: int) -> None: ...

    @property
    def num_protected(self) -> int:
        raise RuntimeError("no config")


@pytest.mark.parametrize(
    ("policy", "knobs", "cause"),
    [
        (ImportError("needs scipy"), {}, "needs scipy"),
        (7, {}, "not callable"),
        (7, {"width": 3}, "not a callable"),
        (Shy, {}, "no config"),
    ],
)
def test_an_entry_point_that_is_broken_is_an_option_error(
    monkeypatch: pytest.MonkeyPatch, policy: Any, knobs: dict[str, int], cause: str
) -> None:
    monkeypatch.setattr("vtoken.policy.entry_points", lambda **_: [Point(policy)])
    with pytest.raises(OptionError, match=f"`policy`='theirs' cannot be made: .*{cause}"):
        make_policy("theirs", 0, 4, knobs)


def test_infinite_scores_can_be_ranked() -> None:
    class Extreme:
        num_protected = 0

        def score(self, view: TokenView) -> np.ndarray:
            return np.array([np.inf, 0.0])

    scores, unknown = checked_scores(Extreme(), view_of([0, 1]))
    assert scores.tolist() == [np.inf, 0.0] and not unknown.any()


def test_a_score_that_is_not_a_number_is_told_apart() -> None:
    class Unsure:
        num_protected = 0

        def score(self, view: TokenView) -> np.ndarray:
            return np.array([2.0, np.nan, -np.inf, np.nan])

    scores, unknown = checked_scores(Unsure(), view_of([0, 1, 2, 3]))
    assert scores.tolist() == [2.0, np.inf, -np.inf, np.inf]
    assert unknown.tolist() == [False, True, False, True]


def test_a_policy_that_needs_an_unknown_signal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Curious:
        num_protected = 0
        signals = frozenset({"value_norm"})

        def __init__(self, seed: int, sinks: int) -> None: ...

    monkeypatch.setitem(POLICIES, "curious", Curious)
    with pytest.raises(OptionError, match=r"`policy`='curious' needs signals \['value_norm'\]"):
        make_policy("curious", seed=0, sinks=4)
