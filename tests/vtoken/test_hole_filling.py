"""Reclaiming in place: which blocks go, which tokens move where, and what a shard refuses."""

from collections import Counter
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.streams import FakeCopyEngine, Memory, Streams
from harness.tables import SIZE, assert_table, make_table
from harness.tiny_engine import TinyEngine
from vtoken.errors import InvariantError
from vtoken.hole_filling import HoleFilling, choose_moves, choose_sources, make_filling
from vtoken.options import EvictionOptions, ReplicaOptions
from vtoken.shard import Shard
from vtoken.table import TokenTable

DEAD = [1, 2, 4, 5, 6, 8, 14]
ROW = [10, 11, 12, 13, 14]

BLOCKS = st.lists(st.tuples(st.integers(0, SIZE), st.booleans()), max_size=8)


def fits(live: list[int], sources: tuple[int, ...], movable: list[int]) -> bool:
    holes = sum(SIZE - live[i] for i in movable if i not in sources)
    return sum(live[i] for i in sources) <= holes


@given(row=BLOCKS, limit=st.integers(0, 9))
def test_no_choice_frees_more_blocks_and_none_moves_fewer_tokens(
    row: list[tuple[int, bool]], limit: int
) -> None:
    live, may_move = [tokens for tokens, _ in row], [moves for _, moves in row]
    movable = [i for i, moves in enumerate(may_move) if moves]
    found = choose_sources(np.array(live, np.int32), np.array(may_move, np.bool_), SIZE, limit)
    assert found.dtype == np.int32 and sorted(set(found)) == found.tolist()
    assert fits(live, tuple(found), movable) and found.size <= limit
    assert set(found.tolist()) <= set(movable)
    for more in combinations(movable, found.size + 1):
        assert found.size == limit or not fits(live, more, movable)
    tokens = sum(live[i] for i in found)
    for other in combinations(movable, found.size):
        assert sum(live[i] for i in other) >= tokens


def filling(table: TokenTable) -> HoleFilling:
    """All that the whole blocks of a table give."""
    movable = np.arange(len(table.block_ids)) < table.tail
    sources = choose_sources(table.block_live, movable, SIZE, 99)
    return make_filling("r", 1, table, (sources, *choose_moves(table, movable, sources)))


def test_live_tokens_of_the_emptiest_blocks_overwrite_dead_ones_at_the_head() -> None:
    table = make_table(18, DEAD, ROW)
    plan = filling(table)
    assert plan.source_indices.tolist() == [1]
    assert (plan.moved.tolist(), plan.holes.tolist()) == ([7], [1])
    assert sorted(plan.gone(table).tolist()) == [1, 4, 5, 6]
    sources, destinations = plan.moves(table)
    assert (sources.tolist(), destinations.tolist()) == ([11 * SIZE + 3], [10 * SIZE + 1])
    table.fill_holes(plan.source_indices, plan.moved, plan.holes)
    rows = [[0, 7, 2, 3], [8, 9, 10, 11], [12, 13, 14, 15], [16, 17]]
    assert_table(table, rows=rows, blocks=[10, 12, 13, 14], live=set(range(18)) - set(DEAD))
    assert (table.shift, table.epoch) == (SIZE, 1)


def test_blocks_without_a_hole_elsewhere_stay() -> None:
    assert filling(make_table(18, [0, 5, 10], ROW)).source_indices.size == 0


class Rig:
    def __init__(self) -> None:
        self.memory = Memory(100, SIZE)
        self.memory.payloads[:] = np.arange(400)
        self.engine = FakeCopyEngine(self.memory, Streams(100))
        self.shard = Shard(0, SIZE, self.engine, {"r": list(ROW)}.get, check=True)
        self.shard.start("r", 1)
        self.plan = filling(make_table(18, DEAD, ROW))


def test_a_shard_moves_at_once_and_splices() -> None:
    rig = Rig()
    (splice,) = rig.shard.fill([rig.plan])
    assert splice.apply([*ROW, 15]) == [10, 12, 13, 14, 15]
    assert splice.shift == rig.shard.shift("r") == SIZE
    assert rig.memory.payloads[10 * SIZE + 1] == 11 * SIZE + 3
    assert rig.shard.tables["r"].positions[:4].tolist() == [0, 7, 2, 3]


def longs(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"incarnation": 2}, "no row of incarnation 2"),
        ({"request_id": "x"}, "no row"),
        ({"epoch": 1}, "epoch 1"),
        ({"length": 99}, "do not fit"),
        ({"digest": 7}, "I6"),
        ({"source_indices": np.array([4], np.int32)}, "not before the tail"),
        ({"source_indices": np.array([], np.int32)}, "not ascending"),
        ({"source_indices": np.array([2], np.int32)}, "in no source block"),
        ({"holes": longs(1, 2)}, "1 tokens for 2 holes"),
        ({"holes": longs(6)}, "a hole is in a source block"),
        ({"holes": longs(17)}, "before the tail"),
        ({"holes": longs(-1)}, "before the tail"),
        ({"holes": longs(1, 1), "moved": longs(6, 7)}, "not ascending"),
        ({"holes": longs(2, 1), "moved": longs(6, 7)}, "not ascending"),
        ({"moved": longs(99)}, "before the tail"),
    ],
)
def test_a_filling_that_does_not_fit_stops_the_shard(
    change: dict[str, object], reason: str
) -> None:
    rig = Rig()
    with pytest.raises(InvariantError, match=reason):
        rig.shard.fill([replace(rig.plan, **change)])
    assert rig.memory.payloads.tolist() == list(range(400))


def test_bytes_that_do_not_arrive_stop_the_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    monkeypatch.setattr(rig.engine, "move", lambda sources, destinations: None)
    with pytest.raises(InvariantError, match="I1: 1 tokens differ"):
        rig.shard.fill([rig.plan])


def test_a_dry_pool_ends_no_plan_that_has_no_block_to_give() -> None:
    """It would only put off what the plan is about to give back."""
    options = ReplicaOptions(backend="whole_blocks", reclaim="eager", theta_f=0)
    engine = TinyEngine(options, 40, Counter())
    keeps = {"budget_tokens": 16, "sinks": 0, "recent": 8, "evict_after_tokens": 0}
    engine.arrive(EvictionOptions(policy="streaming_llm", **keeps), 60)
    for _ in range(40):
        engine.step(12, lag=2)
        (request,) = engine.reclaimer.requests.values()
        if request.open_plan is not None:
            break
    plan = request.open_plan
    assert plan is not None and not plan.destination_blocks.size
    assert not engine.reclaimer.room.make(1000)
    assert request.open_plan is plan
