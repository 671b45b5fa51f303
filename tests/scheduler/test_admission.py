"""Admission arithmetic: who is admitted can stay, and never fewer than without eviction."""

from itertools import product

import pytest

from scheduler.admission import (
    Demand,
    footprint_of,
    headroom_blocks,
    required_blocks,
    worst_blocks,
    worst_live,
)
from vtoken.options import EvictionOptions

SIZE = 16


def options_of(**limits: object) -> EvictionOptions:
    return EvictionOptions(policy="random", **limits)


def most_admitted(num_blocks: int, cap: int, full: int, headroom: int) -> int:
    """How many equal requests run at once in ``num_blocks`` blocks."""
    count, held = 0, Demand(0, 0)
    while required_blocks(Demand(cap, full), held, headroom) <= num_blocks:
        count += 1
        held = Demand(count * cap, count * full)
    return count


def caps(options: EvictionOptions, prompt: int, length: int) -> tuple[int, int]:
    """(blocks that a request of this prompt and length needs at its worst, blocks of its length).

    For a request that shares nothing.
    """
    footprint = footprint_of(options, prompt, length, SIZE)
    return footprint.cap(prompt, num_shared=0), footprint.full


BUDGETS = [36, 64, 128, 500, 512, 1024, 4096, 10_000]
RATIOS = [0.01, 0.1, 0.25, 0.5, 0.6, 0.9, 1.0]
LIMITS = [{"budget_tokens": b} for b in BUDGETS] + [{"keep_ratio": r} for r in RATIOS]
LENGTHS = [(1, 2), (5, 128), (100, 500), (500, 600), (1000, 5000), (4096, 4097), (30_000, 32_000)]
POOLS = [1, 2, 10, 63, 64, 100, 1000, 2048, 12_345]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_at_least_as_many_are_admitted_as_without_eviction(limits: dict[str, float]) -> None:
    for (prompt, length), pool, headroom in product(LENGTHS, POOLS, [0, 0.02, 0.3]):
        cap, full = caps(options_of(**limits), prompt, length)
        admitted = most_admitted(pool, cap, full, headroom_blocks(pool, headroom))
        assert admitted >= pool // full, (prompt, length, pool, headroom)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_a_cap_never_exceeds_the_full_length(limits: dict[str, float]) -> None:
    for prompt, length in LENGTHS:
        cap, full = caps(options_of(**limits), prompt, length)
        assert 1 <= cap <= full


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_what_is_admitted_by_its_caps_fits_beside_the_headroom(limits: dict[str, float]) -> None:
    for (prompt, length), pool in product(LENGTHS, POOLS):
        cap, full = caps(options_of(**limits), prompt, length)
        headroom = headroom_blocks(pool, 0.02)
        admitted = most_admitted(pool, cap, full, headroom)
        fits = admitted * cap + headroom <= pool or admitted * full <= pool
        assert fits, (prompt, length, pool)


def test_a_small_budget_admits_several_times_as_many() -> None:
    cap, full = caps(options_of(budget_tokens=512), 4000, 5000)
    assert most_admitted(2048, cap, full, headroom_blocks(2048, 0.02)) >= 3 * (2048 // full)


@pytest.mark.parametrize(
    ("options", "prompt", "length", "live"),
    [
        ({"budget_tokens": 512}, 100, 5000, 512),
        ({"budget_tokens": 512}, 100, 300, 300),
        ({"budget_tokens": 40}, 100, 5000, 128),  # the policy does not run below 128
        ({"budget_tokens": 40, "evict_after_tokens": 0}, 100, 5000, 40),
        ({"budget_tokens": 40, "evict_after_tokens": 0, "recent": 100}, 100, 5000, 104),
        ({"budget_tokens": 512, "protect_prompt": True}, 2000, 5000, 2032),
        ({"keep_ratio": 0.5}, 100, 5000, 2500),
    ],
)
def test_the_worst_live_count_obeys_budget_floor_and_protection(
    options: dict[str, object], prompt: int, length: int, live: int
) -> None:
    assert worst_live(options_of(**options), prompt, length) == live


@pytest.mark.parametrize(
    ("live", "prefill", "chunk"),
    [
        (512, 512, 0),
        (512, 1024, 0),
        (512, 1025, 512),
        (500, 5000, 496),
        (40, 72, 0),
        (40, 73, 32),
        (10, 27, 16),
        (8192, 10240, 0),
        (8192, 10241, 2048),
    ],
)
def test_only_a_prompt_well_above_its_budget_goes_in_chunks_of_whole_blocks(
    live: int, prefill: int, chunk: int
) -> None:
    options = options_of(budget_tokens=live, sinks=0, recent=1, evict_after_tokens=0)
    footprint = footprint_of(options, prefill, 20_000, SIZE)
    assert (footprint.live, footprint.chunk_limit(prefill)) == (live, chunk)
    assert chunk % SIZE == 0


@pytest.mark.parametrize(
    ("live", "recent", "new", "blocks"),
    [
        (512, 32, 1, 33),  # 31 packed, a full tail, and one
        (512, 1, 1, 34),  # the tail may hold 15 dead tokens: 32 packed, the tail, and one
        (512, 32, 128, 41),  # one token in the tail: 32 packed, and 129
        (1, 1, 1, 2),
        (40, 32, 1, 4),
    ],
)
def test_the_worst_hold_is_packed_tokens_the_tail_and_what_comes_next(
    live: int, recent: int, new: int, blocks: int
) -> None:
    assert worst_blocks(live, recent, new, SIZE) == blocks


@pytest.mark.parametrize(
    ("num_blocks", "fraction", "headroom"),
    [(100, 0.02, 2), (101, 0.02, 3), (1, 0.02, 1), (100, 0, 0), (0, 0.3, 0)],
)
def test_headroom_rounds_up(num_blocks: int, fraction: float, headroom: int) -> None:
    assert headroom_blocks(num_blocks, fraction) == headroom


def test_either_all_fit_at_their_caps_or_all_fit_at_full_length() -> None:
    new, owed = Demand(capped=5, full=20), Demand(capped=7, full=9)
    assert required_blocks(new, owed, headroom=2) == 5 + 7 + 2
    assert required_blocks(new, owed, headroom=50) == 20 + 9
