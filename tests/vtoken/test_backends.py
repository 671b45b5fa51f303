"""Which blocks a backend takes, against every other choice there is."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.backends import (
    BACKENDS,
    Draft,
    Limits,
    hole_filling,
    lazy_compaction,
    none,
    whole_blocks,
)

SIZE = 4
NO_LIMITS = Limits(1000, 1000)

ROWS = st.lists(st.tuples(st.integers(0, SIZE), st.booleans()), max_size=8)


def draft_of(backend: str, row: list[tuple[int, bool]], limits: Limits) -> Draft | None:
    """``row``: live tokens and whether it may move, of each block."""
    live = np.array([tokens for tokens, _ in row], np.int32)
    movable = np.array([moves for _, moves in row], np.bool_)
    return BACKENDS[backend](live, movable, SIZE, limits)


def best_gain(row: list[tuple[int, bool]], limits: Limits) -> tuple[int, int]:
    """(largest gain of any choice of sources, fewest sources that have it), by trying them all."""
    best = (0, 0)
    movable = [tokens for tokens, moves in row if moves]
    for number in range(1, min(limits.max_sources, len(movable)) + 1):
        for chosen in combinations(movable, number):
            destinations = -(-sum(chosen) // SIZE)
            if destinations <= limits.max_destinations and number - destinations > best[0]:
                best = (number - destinations, number)
    return best


@given(row=ROWS, max_sources=st.integers(1, 9), max_destinations=st.integers(0, 5))
def test_compaction_finds_the_largest_gain_with_the_fewest_sources(
    row: list[tuple[int, bool]], max_sources: int, max_destinations: int
) -> None:
    limits = Limits(max_sources, max_destinations)
    draft = draft_of("lazy_compaction", row, limits)
    found = (draft.gain, draft.source_indices.size) if draft else (0, 0)
    assert found == best_gain(row, limits)


@pytest.mark.parametrize("backend", ["lazy_compaction", "whole_blocks"])
@given(row=ROWS)
def test_every_draft_frees_more_than_it_takes_and_only_moves_what_may_move(
    backend: str, row: list[tuple[int, bool]]
) -> None:
    draft = draft_of(backend, row, NO_LIMITS)
    if draft is not None:
        indices = draft.source_indices.tolist()
        assert draft.gain >= 1
        assert indices == sorted(set(indices))
        assert all(row[i][1] for i in indices)
        live = sum(row[i][0] for i in indices)
        assert live <= draft.num_destinations * SIZE, "every live token has a place"


@given(row=ROWS)
def test_whole_blocks_takes_all_dead_blocks_and_no_other(row: list[tuple[int, bool]]) -> None:
    dead = [i for i, (tokens, moves) in enumerate(row) if moves and not tokens]
    draft = draft_of("whole_blocks", row, NO_LIMITS)
    assert (draft.source_indices.tolist() if draft else []) == dead
    assert draft is None or draft.num_destinations == 0


@given(row=ROWS)
def test_none_never_reclaims(row: list[tuple[int, bool]]) -> None:
    assert draft_of("none", row, NO_LIMITS) is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_row_has_no_draft(backend: str) -> None:
    assert draft_of(backend, [], NO_LIMITS) is None


def test_without_a_free_block_only_dead_blocks_are_reclaimed() -> None:
    row = [(1, True), (0, True), (2, True), (1, True)]
    draft = draft_of("lazy_compaction", row, Limits(1000, 0))
    assert draft is not None
    assert (draft.source_indices.tolist(), draft.num_destinations) == ([1], 0)


def test_the_registry_names_every_backend() -> None:
    assert {
        "lazy_compaction": lazy_compaction,
        "hole_filling": hole_filling,
        "whole_blocks": whole_blocks,
        "none": none,
    } == BACKENDS
