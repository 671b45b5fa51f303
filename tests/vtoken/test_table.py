"""The token table: what is resident, what is live, and where."""

from collections.abc import Callable

import numpy as np
import pytest

from harness.tables import SIZE, assert_table, make_plan, make_request, make_table
from vtoken.errors import InvariantError, PlanError
from vtoken.table import TokenTable


def test_new_tokens_fill_the_row_densely_and_are_live() -> None:
    table = make_table(6)
    assert_table(table, rows=[[0, 1, 2, 3], [4, 5]], blocks=[10, 11], live=range(6))
    table.sync_new_tokens([12], 9)
    assert_table(table, rows=[[0, 1, 2, 3], [4, 5, 6, 7], [8]], blocks=[10, 11, 12], live=range(9))
    assert table.block_live.tolist() == [4, 4, 1]


@pytest.mark.parametrize("steps", [[1] * 300, [300], [7] * 40, [128, 1, 1, 33, 200]])
def test_the_way_a_table_grew_does_not_show(steps: list[int]) -> None:
    table, length, blocks = TokenTable(SIZE), 0, 0
    for step in steps:
        length += step
        needed = -(-length // SIZE)
        table.sync_new_tokens(range(blocks, needed), length)
        blocks = needed
    assert_table(
        table,
        rows=[range(i, min(i + SIZE, length)) for i in range(0, length, SIZE)],
        blocks=range(blocks),
        live=range(length),
    )
    assert table.digest() == make_table(length, block_ids=range(blocks)).digest()


def test_blocks_without_tokens_may_come_first() -> None:
    table = make_table(4, block_ids=[10, 11, 12])
    assert table.block_live.tolist() == [4, 0, 0]
    assert table.tail == 0
    assert table.fragmentation == 1 - 4 / 12


def test_an_empty_table_has_no_tail_and_wastes_nothing() -> None:
    table = TokenTable(SIZE)
    assert table.tail == -1 and table.fragmentation == 0.0 and table.resident == 0
    table.check()


@pytest.mark.parametrize(("blocks", "length"), [([], 9), ([12], 13), ([], 5)])
def test_a_length_that_does_not_fit_is_refused(blocks: list[int], length: int) -> None:
    table = make_table(6)
    before = table.digest()
    with pytest.raises(PlanError, match=f"{length} tokens do not fit: 6 known"):
        table.sync_new_tokens(blocks, length)
    assert table.digest() == before


def test_a_dead_token_stays_resident() -> None:
    table = make_table(8, dead=[1, 6])
    assert_table(
        table,
        rows=[[0, 1, 2, 3], [4, 5, 6, 7]],
        blocks=[10, 11],
        live=[0, 2, 3, 4, 5, 7],
    )
    assert table.block_live.tolist() == [3, 3]
    assert table.fragmentation == 0.25


def test_a_dead_block_lies_before_the_tail() -> None:
    blocks = [10, 11, 12, 13]  # the last one has no token yet
    assert make_table(9, dead=[4, 5, 6, 7], block_ids=blocks).has_dead_block
    assert not make_table(9, dead=[3, 4, 5, 6, 8], block_ids=blocks).has_dead_block
    assert not TokenTable(SIZE).has_dead_block


def test_moves_replace_whole_blocks_where_the_first_source_was() -> None:
    request = make_request(19, dead=[4, 5, 6, 8, 9, 11])
    table = request.table
    plan = make_plan(request, sources=[1, 2], destinations=[77])
    table.apply_moves(plan.source_indices, plan.selected, [77])
    assert_table(
        table,
        rows=[[0, 1, 2, 3], [7, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18]],
        blocks=[10, 77, 13, 14],
        live=[0, 1, 2, 3, 7, 10, *range(12, 19)],
    )
    assert (table.shift, table.epoch, table.length) == (SIZE, 1, 19)


def test_sources_need_not_lie_side_by_side() -> None:
    request = make_request(19, dead=[0, 1, 2, 8, 9, 10])
    table = request.table
    plan = make_plan(request, sources=[0, 2], destinations=[77])
    table.apply_moves(plan.source_indices, plan.selected, [77])
    assert_table(
        table,
        rows=[[1, 2, 3, 11], [4, 5, 6, 7], [12, 13, 14, 15], [16, 17, 18]],
        blocks=[77, 11, 13, 14],
        live=[3, 4, 5, 6, 7, *range(11, 19)],
    )


def test_a_token_goes_on_where_it_would_have_without_the_shift() -> None:
    """The tail never moves and the shift is whole blocks, so position % S is the offset."""
    request = make_request(18, dead=range(4, 12))
    plan = make_plan(request, sources=[1, 2], destinations=[])
    table = request.table
    table.apply_moves(plan.source_indices, plan.selected, [])
    table.sync_new_tokens([], 20)
    table.sync_new_tokens([20], 21)
    index = np.flatnonzero(table.positions == 20)[0]
    assert index == 20 - table.shift and index % SIZE == 20 % SIZE
    assert table.block_ids[index // SIZE] == 20


@pytest.mark.parametrize(
    ("sources", "num_selected", "destinations", "reason"),
    [
        ([], 0, 0, "not ascending"),
        ([1, 0], 8, 2, "not ascending"),
        ([1, 1], 8, 2, "not ascending"),
        ([-1, 0], 8, 2, "not ascending"),
        ([0, 4], 4, 1, "not before the tail 4"),
        ([0, 9], 4, 1, "not before the tail 4"),
        ([0, 1], 5, 1, "5 tokens do not fill 1 blocks"),
        ([0, 1], 4, 2, "4 tokens do not fill 2 blocks"),
    ],
)
def test_a_splice_that_does_not_fit_is_refused(
    sources: list[int], num_selected: int, destinations: int, reason: str
) -> None:
    table = make_table(19)
    selected = np.zeros(len(sources) * SIZE, np.bool_)
    selected[:num_selected] = True
    before = table.digest()
    with pytest.raises(PlanError, match=reason):
        table.apply_moves(np.array(sources, np.int32), selected, range(90, 90 + destinations))
    assert table.digest() == before


def test_a_bitmap_of_another_size_is_refused() -> None:
    with pytest.raises(PlanError, match="bitmap of 7 for 2 blocks"):
        make_table(19).check_moves(np.array([0, 1], np.int32), np.ones(7, np.bool_), 1)


@pytest.mark.parametrize("attribute", ["length", "shift", "epoch"])
def test_a_digest_tells_tables_apart_by_a_number(attribute: str) -> None:
    table, other = make_table(9), make_table(9)
    assert table.digest() == other.digest()
    setattr(other, attribute, getattr(other, attribute) - 1)
    assert table.digest() != other.digest()


def test_a_digest_tells_tables_apart_by_their_row_and_their_positions() -> None:
    table = make_table(9)
    assert table.digest() != make_table(9, block_ids=[11, 10, 12]).digest()
    other = make_table(9)
    other._positions[[0, 1]] = other._positions[[1, 0]]
    assert table.digest() != other.digest()


def test_liveness_is_not_part_of_the_digest() -> None:
    """Shards never hear of a death: it is the scheduler's alone."""
    assert make_table(9).digest() == make_table(9, dead=[3]).digest()


@pytest.mark.parametrize(
    ("damage", "invariant"),
    [
        (lambda table: table._positions.__setitem__(0, 5), "I2: a position has two slots"),
        (lambda table: table._positions.__setitem__(0, 99), "I2: a position is outside"),
        (lambda table: table.block_ids.__setitem__(0, 11), "I2: a block is twice"),
        (lambda table: setattr(table, "shift", 1), "I8: shift 1"),
        (lambda table: setattr(table, "num_live", 3), "live counts differ"),
        (lambda table: table._block_live.__setitem__(0, 1), "live counts differ"),
    ],
)
def test_check_finds_a_damaged_table(
    damage: Callable[[TokenTable], object], invariant: str
) -> None:
    table = make_table(9)
    table.check()
    damage(table)
    with pytest.raises(InvariantError, match=invariant):
        table.check()
