"""What a replica says about its blocks and tokens."""

from collections.abc import Callable

from harness.replica import BLOCK_SIZE, Replica, prompt
from harness.scenes import KEEP_HALF, step_until

Make = Callable[..., Replica]


def test_a_shared_block_and_its_tokens_count_once(make: Make) -> None:
    replica = make(num_blocks=40, vtoken={"reclaim": "pressure"})
    for _ in range(4):
        replica.arrive(prompt(0, 260), 100)
    step_until(replica, lambda: replica.counts["steps"] == 20)
    status, pool = replica.scheduler.vtoken_status(), replica.scheduler.block_manager.block_pool
    lengths = [request.num_computed_tokens for request in replica.scheduler.running]
    shared = sum(block.ref_cnt > 1 for block in pool.blocks[1:]) * BLOCK_SIZE
    assert len(lengths) == 4 and shared == 256
    assert status["tokens_live"] == sum(lengths) - 3 * shared
    assert status["tokens_dead_resident"] == 0
    used = status["blocks_total"] - status["blocks_free"]
    assert status["blocks_live"] <= used
    assert status["fragmentation"] == round(1 - status["tokens_live"] / (used * BLOCK_SIZE), 4)


def test_a_shared_token_is_live_as_long_as_anybody_wants_it(make: Make) -> None:
    replica = make(num_blocks=60, vtoken={"reclaim": "pressure"})
    for seed in range(3):
        replica.arrive(prompt(0, 260), 100, **(KEEP_HALF | {"seed": seed}))
    step_until(replica, lambda: replica.counts["steps"] == 20)
    status, scheduler = replica.scheduler.vtoken_status(), replica.scheduler
    wanted: dict[tuple[int, int], bool] = {}  # (block, offset) -> somebody's live token
    for request in scheduler.running:
        row = scheduler.block_manager.req_to_blocks[request.request_id]
        table = scheduler.reclaimer.requests[request.request_id].table
        for index in range(request.num_computed_tokens - table.shift):
            slot = row[index // BLOCK_SIZE].block_id, index % BLOCK_SIZE
            live = index >= table.live.size or bool(table.live[index])
            wanted[slot] = wanted.get(slot, False) or live
    assert status["tokens_live"] == sum(wanted.values())
    assert status["tokens_dead_resident"] == len(wanted) - sum(wanted.values())
    assert 0 < status["tokens_dead_resident"] < len(wanted) / 2, "else nobody's wishes differ"


def test_reclaimable_is_what_a_drain_gives_back_whoever_s_policy_has_failed(make: Make) -> None:
    class Raising:
        num_protected = 0
        signals = frozenset[str]()

        def score(self, view: object) -> None:
            raise KeyError("layer 7")

    replica = make(num_blocks=60, vtoken={"reclaim": "pressure", "low_water": 0})
    replica.arrive(prompt(0, 400), 100, **KEEP_HALF)
    step_until(replica, lambda: replica.counts["steps"] == 25)
    reclaimer = replica.scheduler.reclaimer
    reclaimer.requests["r1"].policy = Raising()
    step_until(replica, lambda: reclaimer.stats.policies_disabled)
    promised = replica.scheduler.vtoken_status()["blocks_reclaimable"]
    assert promised > 0
    reclaimer.reclaim_now()
    step_until(replica, lambda: not reclaimer.planner.draining)
    assert reclaimer.stats.blocks_given_back == promised
    assert replica.scheduler.vtoken_status()["blocks_reclaimable"] == 0
