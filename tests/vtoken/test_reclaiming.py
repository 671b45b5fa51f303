"""The reclaimer and two shards against lists and dicts: no order of events loses a token, a block
or a plan."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from harness.reclaiming import run_reclaiming
from harness.streams import FakeCopyEngine
from vtoken import room
from vtoken.errors import VTokenError
from vtoken.plan import RelocationPlan
from vtoken.planner import Planner
from vtoken.reclaimer import Reclaimer
from vtoken.shard import Shard
from vtoken.table import TokenTable

ENOUGH = {
    "steps": 10_000,
    "commits": 1000,
    "fillings": 300,
    "plans hole_filling": 20,
    "aborts": 200,
    "preemptions": 200,
    "plans preempted": 50,
    "plans finished": 50,
    "plans refused": 10,
    "plans diverged": 10,
    "plans shared": 1,
    "shared blocks": 50,
}


def test_nothing_is_lost_in_ten_thousand_steps() -> None:
    run_reclaiming(ENOUGH)


def forgets_destinations(stock: Callable[..., Any]) -> Callable[..., Any]:
    """An ABORT that keeps its destinations."""

    def abort(self: Reclaimer, *args: Any) -> None:
        give_back, self.port.give_back = self.port.give_back, lambda block_ids: None
        stock(self, *args)
        self.port.give_back = give_back

    return abort


def moves_too_little(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A copy that leaves its last token behind."""

    def moves(self: RelocationPlan) -> Any:
        sources, destinations = stock(self)
        return sources[:-1], destinations[:-1]

    return moves


def splices_at_the_end(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A table that puts the destinations behind the kept blocks."""

    def apply_moves(self: TokenTable, source_indices: Any, *args: Any) -> None:
        stock(self, source_indices, *args)
        self.block_ids.reverse()

    return apply_moves


def keeps_old_tables(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A shard that goes on with the table of the incarnation before."""
    return lambda self, request_id, incarnation: self.incarnations.update({request_id: incarnation})


def moves_the_tail(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A planner that takes the partial block for a full one."""

    def look_at(self: Planner, request: Any) -> Any:
        stock(self, request)
        return self.port.private(request.request_id)[: request.table.block_live.size]

    return look_at


def overwrites_live_tokens(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Holes that are none."""

    def choose_moves(table: TokenTable, movable: Any, source_indices: Any) -> Any:
        moved, holes = stock(table, movable, source_indices)
        return moved, np.flatnonzero(np.repeat(movable, table.block_size))[: holes.size]

    return choose_moves


def moves_nothing(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A device that forgets what is to be moved in place."""
    return lambda self, sources, destinations: None


PLANTED = [
    (room, "choose_moves", overwrites_live_tokens),
    (FakeCopyEngine, "move", moves_nothing),
    (Reclaimer, "abort", forgets_destinations),
    (RelocationPlan, "moves", moves_too_little),
    (TokenTable, "apply_moves", splices_at_the_end),
    (Shard, "start", keeps_old_tables),
    (Planner, "_look_at", moves_the_tail),
]


@pytest.mark.parametrize(
    ("owner", "name", "fault"), PLANTED, ids=lambda v: getattr(v, "__name__", v)
)
def test_a_planted_fault_is_seen(
    owner: type, name: str, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, fault(getattr(owner, name)))
    with pytest.raises((AssertionError, VTokenError, IndexError, ValueError, KeyError)) as found:
        run_reclaiming({"commits": 150, "preemptions": 50}, max_rounds=12)
    print(repr(found.value)[:150])
    assert "wanted" not in str(found.value)
