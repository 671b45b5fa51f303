"""A shard executes plans and votes. What does not fit becomes a vote with a reason."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.streams import FakeCopyEngine, Memory, Streams
from harness.tables import SIZE, make_plan, make_request
from vtoken.errors import InvariantError
from vtoken.plan import RelocationPlan, StepOrders, Vote
from vtoken.shard import Shard, Splice

ROW = [10, 11, 12, 13]


class Rig:
    """A shard that runs request r, incarnation 1, 15 tokens in blocks 10..13."""

    def __init__(self) -> None:
        memory = Memory(100, SIZE)
        memory.payloads[:] = np.arange(400)
        self.engine = FakeCopyEngine(memory, Streams(100))
        self.rows: dict[str, list[int]] = {"r": list(ROW)}
        self.shard = Shard(0, SIZE, self.engine, self.rows.get, check=True)
        self.shard.start("r", 1)
        request = make_request(15, dead=[5, 6, 7, 8, 9, 10])
        self.plan = make_plan(request, sources=[1, 2], destinations=[77])

    def prepare(self, plan: RelocationPlan | None = None) -> Vote:
        (vote,) = self.shard.prepare([plan or self.plan])
        return vote

    def settle(self, **orders: Any) -> list[Splice]:
        return self.shard.settle(StepOrders(**orders))


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_plan_that_fits_is_voted_for_and_copied() -> None:
    rig = Rig()
    assert rig.prepare() == Vote(1, 0, rig.plan.digest, ok=True, copied=False)
    assert rig.shard.copied() == [Vote(1, 0, rig.plan.digest, ok=True, copied=True)]
    assert rig.shard.copied() == [], "said once"


def test_a_copy_that_is_not_done_is_not_reported() -> None:
    rig = Rig()
    rig.engine.lag = 1
    rig.prepare()
    assert rig.shard.copied() == []
    rig.engine.lag = 0
    assert [vote.copied for vote in rig.shard.copied()] == [True]


def test_commit_is_a_splice_and_a_shift() -> None:
    rig = Rig()
    rig.prepare()
    (splice,) = rig.settle(commits=(1,))
    assert (splice.request_id, splice.shift) == ("r", SIZE)
    # The runner's row may have grown since.
    assert splice.apply([*ROW, 14]) == [10, 77, 13, 14]
    assert rig.shard.shift("r") == SIZE
    assert not rig.engine.copies, "main waits for the copy"


def test_abort_waits_and_changes_nothing() -> None:
    rig = Rig()
    rig.prepare()
    digest = rig.shard.tables["r"].digest()
    assert rig.settle(aborts=(1,)) == []
    assert rig.shard.tables["r"].digest() == digest
    assert not rig.engine.copies and rig.shard.copied() == []


Change = Callable[[Rig], RelocationPlan]

DOES_NOT_FIT: list[tuple[str, Change]] = [
    ("no row of incarnation 1", lambda rig: rig.rows.clear() or rig.plan),
    ("no row of incarnation 2", lambda rig: replace(rig.plan, incarnation=2)),
    ("no row of incarnation 1", lambda rig: replace(rig.plan, request_id="s")),
    ("epoch 1, but the table here is at 0", lambda rig: replace(rig.plan, epoch=1)),
    ("17 tokens do not fit", lambda rig: replace(rig.plan, length=17)),
    ("not ascending", lambda rig: replace(rig.plan, source_indices=ints(2, 1))),
    ("not before the tail", lambda rig: replace(rig.plan, source_indices=ints(1, 3))),
    ("not before the tail", lambda rig: replace(rig.plan, source_indices=ints(1, 99))),
    ("2 source blocks at 1 ind", lambda rig: replace(rig.plan, source_indices=ints(1))),
    ("bitmap of 7 for 2", lambda rig: replace(rig.plan, kept=np.ones(7, np.bool_))),
    ("bitmap of 9 for 2", lambda rig: replace(rig.plan, fillers=np.zeros(9, np.bool_))),
    ("blocks of 8 tokens, here of 4", lambda rig: replace(rig.plan, block_size=8)),
    ("not all blocks of the pool", lambda rig: replace(rig.plan, destination_blocks=ints(100))),
    ("not all blocks of the pool", lambda rig: replace(rig.plan, destination_blocks=ints(0))),
    ("not all blocks of the pool", lambda rig: replace(rig.plan, destination_blocks=ints(-1))),
    ("do not fill 2 blocks", lambda rig: replace(rig.plan, destination_blocks=ints(77, 78))),
    (
        "I4: the plan frees nothing",
        lambda rig: replace(rig.plan, kept=np.ones(8, np.bool_), destination_blocks=ints(77, 78)),
    ),
    ("sources are \\[11, 12\\] here", lambda rig: replace(rig.plan, source_blocks=ints(11, 13))),
    ("I2: a destination is in the row", lambda rig: replace(rig.plan, destination_blocks=ints(13))),
]


@pytest.mark.parametrize(("reason", "change"), DOES_NOT_FIT)
def test_a_plan_that_does_not_fit_is_refused_with_a_reason(reason: str, change: Change) -> None:
    rig = Rig()
    vote = rig.prepare(change(rig))
    assert (vote.ok, vote.copied, vote.digest) == (False, False, 0)
    assert re.search(reason, vote.reason)
    assert not rig.engine.copies, "nothing is copied"
    assert rig.settle(aborts=(1,)) == []
    rig.rows["r"] = list(ROW)
    assert rig.prepare(replace(rig.plan, plan_id=1)).ok, "the table has not suffered"


def test_a_row_that_is_not_the_table_s_is_refused() -> None:
    rig = Rig()
    rig.prepare()
    rig.settle(commits=(1,))  # and the runner does not apply the splice
    rig.rows["r"] = [*ROW, 14]
    vote = rig.prepare(replace(rig.plan, plan_id=2, epoch=1, source_indices=ints(0, 1)))
    assert vote.reason == "the row here is not the row of the table"


@pytest.mark.parametrize("destinations", [(77, 77), (10, 77)])
def test_a_destination_may_not_be_used_twice(destinations: tuple[int, int]) -> None:
    rig = Rig()
    request = make_request(15, dead=[5, 6, 7, 8, 9, 10])
    plan = make_plan(request, sources=[0, 1, 2], destinations=destinations)
    assert rig.prepare(plan).reason.startswith("I2: a destination is in the row or twice")


def begin_anew(shard: Shard) -> None:
    shard.start("r", 2)


def end(shard: Shard) -> None:
    shard.stop("r")


def end_and_begin_anew(shard: Shard) -> None:
    shard.stop("r")
    shard.start("r", 2)


@pytest.mark.parametrize("event", [begin_anew, end, end_and_begin_anew])
def test_commit_for_an_unknown_incarnation_waits_and_changes_nothing(
    event: Callable[[Shard], None],
) -> None:
    rig = Rig()
    rig.prepare()
    event(rig.shard)
    assert rig.settle(commits=(1,)) == []
    assert not rig.engine.copies, "main waits for the copy"
    assert not rig.shard.tables and rig.shard.shift("r") == 0


@pytest.mark.parametrize("order", ["commits", "aborts"])
def test_an_order_about_an_unknown_plan_is_an_error(order: str) -> None:
    with pytest.raises(InvariantError, match="plan 7 is not open on rank 0"):
        Rig().settle(**{order: (7,)})


def test_a_flipped_byte_is_caught_when_checks_are_on() -> None:
    rig = Rig()
    rig.engine.corrupts = True
    assert rig.prepare().ok
    (vote,) = rig.shard.copied()
    assert (vote.ok, vote.copied) == (False, False)
    assert vote.reason == "I1: 1 moved tokens differ from their sources"


def test_a_flipped_byte_passes_when_checks_are_off() -> None:
    """Comparing costs a second pass over the bytes: that is what the option buys."""
    rig = Rig()
    rig.shard.check = False
    rig.engine.corrupts = True
    rig.prepare()
    (vote,) = rig.shard.copied()
    assert vote.ok and vote.copied


def test_another_table_gives_another_digest() -> None:
    rig, other = Rig(), Rig()
    rig.prepare()
    rig.settle(aborts=(1,))
    table = rig.shard.tables["r"]
    table._positions[[8, 11]] = table._positions[[11, 8]]
    vote = rig.prepare(replace(rig.plan, plan_id=1))
    assert vote.ok and vote.digest != other.prepare().digest


def test_a_request_that_begins_anew_has_no_shift() -> None:
    rig = Rig()
    rig.prepare()
    rig.settle(commits=(1,))
    rig.shard.start("r", 2)
    assert rig.shard.shift("r") == 0
    assert rig.shard.shift("never heard of") == 0
