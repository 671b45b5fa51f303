"""Factories for tables, requests and plans, with blocks of 4 tokens."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from vtoken.backends import Draft
from vtoken.options import EvictionOptions
from vtoken.plan import RelocationPlan
from vtoken.request import EvictingRequest
from vtoken.table import TokenTable

SIZE = 4


def make_table(
    length: int, dead: Iterable[int] = (), block_ids: Sequence[int] | None = None
) -> TokenTable:
    """A table of ``length`` tokens in just enough blocks: 10, 11, ... unless given."""
    table = TokenTable(SIZE)
    if block_ids is None:
        block_ids = range(10, 10 - -length // SIZE)
    table.sync_new_tokens(block_ids, length)
    for position in dead:
        kill(table, position)
    return table


def kill(table: TokenTable, position: int) -> None:
    """One live position dies."""
    (found,) = np.flatnonzero(table.positions == position)
    assert table.live[found], f"{position} is dead"
    table.evict_indices(np.array([found]))


def make_request(
    length: int, dead: Iterable[int] = (), block_ids: Sequence[int] | None = None, **options: Any
) -> EvictingRequest:
    """A request called r, incarnation 1, whose table is ``make_table``'s."""
    wanted = {"policy": "streaming_llm", "budget_tokens": 64, **options}
    request = EvictingRequest("r", 1, EvictionOptions(**wanted), SIZE)
    request.table = make_table(length, dead, block_ids)
    return request


def make_plan(
    request: EvictingRequest,
    sources: Sequence[int],
    destinations: Sequence[int],
    plan_id: int = 1,
) -> RelocationPlan:
    """The plan that moves these row indices to these block ids."""
    draft = Draft(np.array(sources, np.int32), len(destinations))
    return request.build_plan(draft, plan_id, destinations)


def assert_plan(plan: RelocationPlan, *, moves: dict[int, int], frees: Sequence[int]) -> None:
    """``moves``: source slot -> destination slot; ``frees``: ids of the source blocks."""
    sources, destinations = plan.moves()
    assert dict(zip(sources.tolist(), destinations.tolist(), strict=True)) == moves
    assert plan.source_blocks.tolist() == list(frees)
    assert plan.num_moves == len(moves)
    assert plan.gain == len(frees) - plan.destination_blocks.size


def assert_table(
    table: TokenTable, *, rows: Sequence[Sequence[int]], blocks: Sequence[int], live: Iterable[int]
) -> None:
    """``rows``: the positions in each block of the row; ``blocks``: its block ids."""
    table.check()
    assert table.positions.tolist() == [position for row in rows for position in row]
    assert table.block_ids == list(blocks)
    assert set(table.positions[table.live].tolist()) == set(live)
    assert table.num_live == len(set(live))
    assert table.resident == table.length - table.shift
