"""When the planner reclaims, from whom, and what it leaves to running requests."""

from collections import Counter
from typing import Any, cast

import pytest

from harness.pool import SimplePool
from harness.tables import SIZE, kill, make_request
from harness.tiny_engine import TinyEngine
from vtoken.options import EvictionOptions, ReplicaOptions
from vtoken.plan import RelocationPlan
from vtoken.planner import MAX_DRAFTS, MOVE_COST, PLAN_COST, Planner
from vtoken.request import EvictingRequest


def make_planner(num_blocks: int = 100, **options: Any) -> tuple[Planner, SimplePool]:
    pool = SimplePool(num_blocks, SIZE)
    return Planner(ReplicaOptions(**options), SIZE, pool), pool


def add(
    planner: Planner, pool: SimplePool, request_id: str, length: int, dead: list[int]
) -> EvictingRequest:
    """A request of that length with dead tokens, known to the planner."""
    pool.begin(request_id, [], 0)
    pool.grow(request_id, length)
    request = make_request(length, dead, pool.rows[request_id])
    request.request_id = request_id
    planner.note(request)
    return request


def names(planner: Planner, blocked: bool = False) -> list[str]:
    return [request.request_id for request, _ in planner.proposals(blocked)]


HALF_DEAD = [*range(0, 16, 2)]


def test_eager_reclaims_whatever_wastes_more_than_theta() -> None:
    planner, pool = make_planner(reclaim="eager")
    add(planner, pool, "a", 18, HALF_DEAD)
    add(planner, pool, "b", 18, [0, 1])
    assert names(planner) == ["a"]


@pytest.mark.parametrize(
    ("free", "blocked", "chosen"),
    [
        (60, False, []),
        (40, False, ["a"]),  # near the low-water mark: F > theta_f decides
        (20, False, ["a", "b"]),  # below it: anything with a gain
        (60, True, ["a", "b"]),
    ],
)
def test_pressure_looks_at_free_blocks(free: int, blocked: bool, chosen: list[str]) -> None:
    planner, pool = make_planner(low_water=0.2, theta_f=0.4)
    add(planner, pool, "a", 18, HALF_DEAD)
    add(planner, pool, "b", 18, [0, 1, 4, 5])
    pool.take(pool.num_free() - free)
    for _ in range(10):
        planner.candidates(False)  # the pool has been so for a while
    assert sorted(names(planner, blocked)) == chosen


def test_a_burst_is_answered_before_the_pool_is_low() -> None:
    """A fixed mark sees it when the blocks are gone: a plan that is opened
    then gives its blocks back some steps too late."""
    planner, pool = make_planner(low_water=0.2, theta_f=0.4)
    add(planner, pool, "a", 18, HALF_DEAD)
    add(planner, pool, "b", 18, [0, 1, 4, 5])
    pool.take(pool.num_free() - 60)
    for _ in range(10):
        planner.candidates(False)
    assert names(planner) == []
    pool.take(11)
    assert sorted(names(planner)) == ["a"], "49 - 11 is near the mark"
    pool.take(15)
    assert sorted(names(planner)) == ["b"], "34 - 15 is below it"


def test_in_place_the_planner_drafts_nothing() -> None:
    planner, pool = make_planner(backend="hole_filling", reclaim="eager")
    request = add(planner, pool, "a", 18, HALF_DEAD)
    assert planner.proposals(blocked=True) == []
    assert planner.candidates(blocked=True) == [request]


def test_the_best_gain_per_moved_token_comes_first() -> None:
    planner, pool = make_planner(reclaim="eager", theta_f=0)
    add(planner, pool, "few", 18, [0, 1, 4, 5])
    add(planner, pool, "all", 18, list(range(16)))
    add(planner, pool, "half", 18, HALF_DEAD)
    assert names(planner) == ["all", "half", "few"]


@pytest.mark.parametrize(("owed", "chosen"), [(0, ["a"]), (3, ["a"]), (4, [])])
def test_running_requests_keep_the_blocks_they_are_about_to_need(
    owed: int, chosen: list[str]
) -> None:
    planner, pool = make_planner(num_blocks=9, reclaim="eager")
    add(planner, pool, "a", 18, HALF_DEAD)
    assert pool.num_free() == 4
    pool.owed = owed
    assert names(planner) == chosen
    pool.owed = 0
    assert bool(names(planner)) is not bool(chosen), "what lacked destinations is tried again"


def test_destinations_of_one_step_are_counted_together() -> None:
    planner, pool = make_planner(num_blocks=18, reclaim="eager")
    for name in "abc":
        add(planner, pool, name, 18, HALF_DEAD)
    assert pool.num_free() == 3
    assert names(planner) == ["a"]
    pool.take(1)
    assert names(planner) == ["b"]


def test_shared_blocks_and_the_tail_stay_where_they_are() -> None:
    planner, pool = make_planner(reclaim="eager", theta_f=0)
    request = add(planner, pool, "a", 18, HALF_DEAD)
    pool.begin("b", pool.rows["a"][:2], 8)
    ((_, draft),) = planner.proposals(blocked=False)
    assert request.table.tail == 4
    assert draft.source_indices.tolist() == [2, 3]


def test_a_request_without_a_gain_is_forgotten_until_it_changes() -> None:
    planner, pool = make_planner(reclaim="eager", theta_f=0)
    request = add(planner, pool, "a", 18, [0, 4, 8])
    assert names(planner) == []
    assert not planner._dirty and not planner._wasteful
    kill(request.table, 12)
    planner.note(request)
    assert names(planner) == ["a"]


def test_a_request_with_an_open_plan_waits() -> None:
    planner, pool = make_planner(reclaim="eager")
    request = add(planner, pool, "a", 18, HALF_DEAD)
    request.open_plan = object()
    assert names(planner) == []
    request.open_plan = None
    assert names(planner) == ["a"]


def test_at_most_so_many_drafts_a_step() -> None:
    planner, pool = make_planner(num_blocks=200, reclaim="eager")
    for i in range(MAX_DRAFTS + 4):
        add(planner, pool, f"r{i}", 18, HALF_DEAD)
    assert len(names(planner)) == MAX_DRAFTS
    assert len(names(planner)) == 4


@pytest.mark.parametrize(("others", "sources"), [(0, 32), (7, 4), (15, 2)])
def test_a_burst_of_deaths_gets_what_others_do_not_need(others: int, sources: int) -> None:
    """``batch_blocks`` times MAX_DRAFTS blocks in all: alone, a long prompt of which half has died
    is packed by one plan and not by many, one after the other."""
    planner, pool = make_planner(num_blocks=500, reclaim="eager", batch_blocks=2)
    add(planner, pool, "long", 162, list(range(0, 160, 2)))
    for i in range(others):
        add(planner, pool, f"r{i}", 18, HALF_DEAD)
    drafts = {request.request_id: draft for request, draft in planner.proposals(blocked=False)}
    assert len(drafts) == 1 + others
    assert drafts["long"].source_indices.size == sources


@pytest.mark.parametrize(
    ("dead", "given", "moved_to"),
    [
        ([*range(4, 8)], [[1]], 0),  # all of a block
        ([*range(4, 8), *HALF_DEAD[4:]], [[1]], 1),  # and half of two more, which have to move
        (HALF_DEAD, [], 2),
    ],
)
def test_what_costs_no_copy_is_given_back_below_theta(
    dead: list[int], given: list[list[int]], moved_to: int
) -> None:
    """``moved_to``: the destinations of a plan when blocks are short."""
    planner, pool = make_planner(reclaim="eager", theta_f=0.6)
    request = add(planner, pool, "a", 18, dead)
    drafts = planner.proposals(blocked=False)
    assert [draft.source_indices.tolist() for _, draft in drafts] == given
    assert all(draft.num_destinations == 0 for _, draft in drafts)
    planner.note(request)
    ((_, draft),) = planner.proposals(blocked=True)
    assert draft.num_destinations == moved_to


def test_a_dead_block_of_many_holders_changes_nothing() -> None:
    """It cannot be given back, but what else the request has to give is not forgotten."""
    planner, pool = make_planner(reclaim="eager", theta_f=0.6)
    add(planner, pool, "a", 18, [*range(4), *HALF_DEAD[4:]])
    pool.begin("b", pool.rows["a"][:1], 4)
    assert names(planner) == []
    assert names(planner, blocked=True) == ["a"]


@pytest.mark.parametrize("backend", ["none", "hole_filling"])
def test_other_backends_wait_for_theta(backend: str) -> None:
    planner, pool = make_planner(backend=backend, reclaim="eager", theta_f=0.6)
    add(planner, pool, "a", 18, [*range(4, 8)])
    assert planner.candidates(blocked=False) == []


def live_on(planner: Planner, pool: SimplePool, request: EvictingRequest, num_tokens: int) -> None:
    """It grows by so many tokens, and one that came last dies."""
    pool.grow(request.request_id, num_tokens)
    length = pool.length(request.request_id)
    table = request.table
    table.sync_new_tokens(pool.row_from(request.request_id, len(table.block_ids)), length)
    kill(table, length - 1)
    planner.note(request)


def test_reads_in_vain_are_dead_tokens_times_steps() -> None:
    planner, pool = make_planner()
    request = add(planner, pool, "a", 18, HALF_DEAD)
    request.prefill_end = 58
    assert request.read_in_vain == 0, "they have only just died"
    live_on(planner, pool, request, 40)
    assert request.read_in_vain == 8, "a chunk of a prefill is one step"
    live_on(planner, pool, request, 10)
    assert request.read_in_vain == 8 + 10 * 9, "a decoding step computes one token"
    planner.note(request)
    assert request.read_in_vain == 98, "and no step has passed since"


def test_adaptive_copies_once_as_much_was_read_as_the_copy_costs() -> None:
    planner, pool = make_planner(reclaim="adaptive", theta_f=0)
    request = add(planner, pool, "a", 18, HALF_DEAD)
    assert names(planner) == []
    price = MOVE_COST * 8 + PLAN_COST  # 8 live tokens of 4 blocks into 2
    for reads in (PLAN_COST, price - 1, price):
        request.read_in_vain = reads
        planner.note(request)
        assert names(planner) == (["a"] if reads == price else [])
    assert request.read_in_vain == 0
    planner.note(request)
    assert names(planner) == []
    assert names(planner, blocked=True) == ["a"], "unless blocks are short"


def test_what_dies_fast_is_reclaimed_soon() -> None:
    """With a fixed share dead it would be 4 times sooner, and half of that is cheaper."""
    waited = {}
    for every in (2, 8):
        planner, pool = make_planner(num_blocks=4000, reclaim="adaptive")
        request, steps = add(planner, pool, "a", 2002, []), 0
        while not names(planner):
            live_on(planner, pool, request, every)
            steps += every
            assert steps < 5000
        waited[every] = steps
    assert 1.8 * waited[2] < waited[8] < 2.5 * waited[2]


def test_giving_back_dead_blocks_pays_for_nothing() -> None:
    """Else a request that gives some back now and then would never be packed."""
    planner, pool = make_planner(reclaim="adaptive")
    request = add(planner, pool, "a", 18, [*range(4), *HALF_DEAD[4:]])
    request.read_in_vain = PLAN_COST // 2
    assert names(planner) == ["a"]
    assert request.read_in_vain == PLAN_COST // 2


def test_filling_holes_ends_the_count_too() -> None:
    engine = TinyEngine(ReplicaOptions(reclaim="adaptive"), 40, Counter())
    engine.arrive(EvictionOptions(policy="random", budget_tokens=16, evict_after_tokens=0), 60)
    for _ in range(8):
        engine.step(12, 0)
    (request,) = engine.reclaimer.requests.values()
    assert request.read_in_vain > 0
    engine.reclaimer.room.fill(request)
    assert engine.reclaimer.room.fillings and request.read_in_vain == 0
    table = request.table
    dead, length = table.resident - table.num_live, table.length
    engine.step(1, 0)
    table.sync_new_tokens([], length + 1)
    request.count_reads()
    assert request.read_in_vain == dead, "only what the filling has left"


@pytest.mark.parametrize("backend", ["none", "whole_blocks"])
def test_only_what_would_copy_gives_dead_blocks_back_before_theta_f(backend: str) -> None:
    planner, pool = make_planner(backend=backend, reclaim="eager", theta_f=0.3)
    request = add(planner, pool, "a", 18, [*range(4, 8), 0, 1])  # noted above theta_f ...
    request.table.sync_new_tokens(pool.grow("a", 14), 32)
    assert request.table.has_dead_block and request.table.fragmentation < 0.3  # ... and grown since
    assert names(planner) == []


def test_theta_f_is_compared_with_what_is_dead_now() -> None:
    """And not with the share of the last tick."""
    planner, pool = make_planner(reclaim="eager", theta_f=0.3)
    add(planner, pool, "a", 18, HALF_DEAD)
    pool.grow("a", 14)  # 8 of 32
    assert names(planner) == []


def test_adaptive_does_not_wait_for_a_tick() -> None:
    """When half a prompt dies at once the next tick is far, and if its policy has failed there is
    none: the copy is made in the step in which it is worth it."""
    planner, pool = make_planner(num_blocks=9000, reclaim="adaptive")
    request, steps = add(planner, pool, "a", 4002, [*range(0, 4000, 2)]), 0
    while not names(planner):
        pool.grow("a", 1)
        steps += 1
        assert steps < 100
        planner.step = steps
    price = MOVE_COST * 2000 + PLAN_COST
    assert steps == -(-price // 2000) == 5
    assert request.read_in_vain == 0


def test_what_is_read_while_a_plan_is_open_is_nobodys_fault() -> None:
    engine = TinyEngine(ReplicaOptions(reclaim="eager", theta_f=0), 40, Counter())
    engine.arrive(EvictionOptions(policy="random", budget_tokens=999), 40)
    engine.step(40, 0)
    (request,) = engine.reclaimer.requests.values()
    for position in range(0, 32, 2):
        kill(request.table, position)
    engine.texts[request.request_id].evict([*range(0, 32, 2)])
    engine.reclaimer.planner.note(request)
    for lag in [1] * 9 + [0]:  # its copy is long on its way
        engine.step(1, lag)
        for rank in range(2):
            engine.hear(rank)
    engine.reclaimer.begin_step(engine.reclaimer.planner.step + 1)
    assert engine.reclaimer.stats.tokens_moved == 16
    assert request.read_in_vain == 0


def test_open_plans_hide_nobody() -> None:
    planner, pool = make_planner(num_blocks=400, reclaim="eager")
    requests = [add(planner, pool, f"{i}", 18, HALF_DEAD) for i in range(MAX_DRAFTS + 2)]
    for request in requests[:MAX_DRAFTS]:
        request.open_plan = cast(RelocationPlan, "open")
    assert names(planner) == ["16", "17"]


def test_a_drain_plans_everything_with_a_gain() -> None:
    planner, pool = make_planner(num_blocks=200, batch_blocks=2)
    request = add(planner, pool, "a", 194, [*range(0, 192, 2)])
    add(planner, pool, "b", 18, [0, 1, 4, 5])
    assert names(planner) == []
    planner.drain([request])
    ((drained, draft),) = planner.proposals(False)
    assert drained is request and draft.source_indices.size == 48, "no limit of a step"
    assert planner.draining
    request.open_plan = cast(RelocationPlan, "open")
    assert names(planner) == []
    assert planner.draining, "it is not known yet whether there is more"


def test_a_drain_ends_while_requests_go_on() -> None:
    """Tokens die at every tick, so there is always something new to reclaim soon."""
    engine = TinyEngine(ReplicaOptions(theta_f=0.9, low_water=0), 200, Counter())
    options = EvictionOptions(
        policy="random", budget_tokens=16, tick_tokens=1, evict_after_tokens=0, recent=1
    )
    for _ in range(4):
        engine.arrive(options, 60)

    def step() -> None:
        engine.step(12, 0)
        for rank in range(2):
            engine.hear(rank)

    for _ in range(20):
        step()
    reclaimer = engine.reclaimer
    before = reclaimer.stats.plans_committed  # while others waited for blocks
    reclaimer.reclaim_now()
    for _ in range(12):
        step()
    assert not reclaimer.planner.draining
    assert len(reclaimer.requests) == 4 and reclaimer.stats.plans_committed >= before + 4


def test_what_can_be_reclaimed_is_the_gain_of_plans_without_limits() -> None:
    planner, pool = make_planner(batch_blocks=2)
    requests = [add(planner, pool, name, 18, HALF_DEAD) for name in "ab"]
    requests.append(add(planner, pool, "c", 18, []))
    pool.take(pool.num_free())
    assert planner.reclaimable(requests) == 4
