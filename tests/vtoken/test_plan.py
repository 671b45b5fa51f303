"""Relocation plans: what they move, what they free, and what makes their digests equal."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from harness.tables import SIZE, assert_plan, make_plan, make_request
from vtoken.plan import NO_ORDERS, RelocationPlan, StepOrders, plan_digest


def example() -> RelocationPlan:
    """Live 4 and 11, of 8 dead ones in three blocks two ride along; one block comes free."""
    request = make_request(15, dead=[5, 6, 7, 8, 9, 10])
    return make_plan(request, sources=[1, 2], destinations=[77])


def test_live_tokens_move_and_the_best_dead_ones_fill_the_block() -> None:
    # Block 11 holds 4..7 and block 12 holds 8..11; streaming_llm likes late positions.
    assert_plan(example(), moves={44: 308, 49: 309, 50: 310, 51: 311}, frees=[11, 12])


def test_fillers_and_kept_tokens_are_apart_and_fill_whole_blocks() -> None:
    plan = example()
    assert not (plan.kept & plan.fillers).any()
    assert plan.kept.sum() == 2 and plan.fillers.sum() == 2
    assert plan.selected.sum() == plan.destination_blocks.size * SIZE


def test_dead_blocks_leave_without_a_move() -> None:
    request = make_request(15, dead=range(4, 12))
    assert_plan(make_plan(request, sources=[1, 2], destinations=[]), moves={}, frees=[11, 12])


def test_moves_keep_the_order_of_the_row() -> None:
    request = make_request(23, dead=[1, 3, 8, 9, 13, 14], policy="random")
    sources, destinations = make_plan(request, sources=[0, 2, 3], destinations=[90, 80]).moves()
    assert destinations.tolist() == [360, 361, 362, 363, 320, 321, 322, 323]
    assert np.all(np.diff(sources) > 0)


def test_a_plan_cannot_be_written_to() -> None:
    plan = example()
    for array in (plan.source_indices, plan.source_blocks, plan.kept, plan.fillers):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_a_plan_survives_the_way_to_another_process() -> None:
    plan = example()
    other = pickle.loads(pickle.dumps(StepOrders(prepares=(plan,)))).prepares[0]
    positions = np.array([4, 9, 10, 11], np.int32)
    assert plan_digest(other, positions) == plan_digest(plan, positions) == plan.digest


CHANGES = [
    {"plan_id": 2},
    {"request_id": "s"},
    {"incarnation": 2},
    {"epoch": 1},
    {"length": 16},
    {"source_indices": np.array([0, 2], np.int32)},
    {"source_blocks": np.array([11, 13], np.int32)},
    {"destination_blocks": np.array([78], np.int32)},
    {"kept": np.array([0, 0, 0, 0, 0, 0, 0, 1], np.bool_)},
    {"fillers": np.array([0, 0, 0, 1, 0, 1, 0, 0], np.bool_)},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_any_other_field_gives_another_digest(change: dict[str, object]) -> None:
    plan, positions = example(), np.array([4, 9, 10, 11], np.int32)
    assert plan_digest(replace(plan, **change), positions) != plan.digest


def test_other_positions_in_the_moved_slots_give_another_digest() -> None:
    assert plan_digest(example(), np.array([4, 9, 11, 10], np.int32)) != example().digest


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        (NO_ORDERS, False),
        (StepOrders(started={"r": 1}), True),
        (StepOrders(commits=(1,)), True),
        (StepOrders(aborts=(1,)), True),
        (StepOrders(prepares=(example(),)), True),
    ],
)
def test_orders_are_true_when_there_is_something_to_do(orders: StepOrders, expected: bool) -> None:
    assert bool(orders) is expected
