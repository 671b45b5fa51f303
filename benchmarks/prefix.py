# SPDX-License-Identifier: Apache-2.0
"""Shared prefixes: their blocks stay where they are, the private ones are reclaimed.

    python -m benchmarks.prefix [--rounds 3]

8 requests of 8,192 shared + 8,192 private prompt tokens, in groups of 1, 2, 4 and 8 that share;
half of the tokens kept. Blocks in use once everything with a gain is reclaimed, for stock vLLM,
naive eviction and vToken, each with prefix caching on.
"""

from typing import Any

from benchmarks.arms import Arm, by_turns, side_by_side
from benchmarks.capacity import NAIVE, SHAPE, engine_arguments
from benchmarks.command import parser, publish, short
from benchmarks.engine import Engine
from benchmarks.results import Part, spread

REQUESTS, SHARED, PRIVATE, STEPS = 8, 8192, 8192, 160
GROUPS = (1, 2, 4, 8)
HALF = {"policy": "random", "keep_ratio": 0.5}


def share(engine: Engine, group: int, seed: int) -> dict[str, Any]:
    """Prefill everything, decode a little, reclaim, and count the blocks in use."""
    assert engine.llm.reset_prefix_cache()
    step, number = engine.llm.llm_engine.step, seed * 1000
    for i in range(REQUESTS):
        head = engine.text(number + i // group, SHARED)
        engine.send(head + engine.text(number + 100 + i, PRIVATE), 4 * STEPS, HALF)
        if i % group == 0:
            # The others of the group must find its blocks in the cache.
            while engine.scheduler.waiting or any(
                request.num_computed_tokens < SHARED for request in engine.scheduler.running
            ):
                step()
    while engine.scheduler.waiting or any(r.is_prefill_chunk for r in engine.scheduler.running):
        step()
    for _ in range(STEPS):
        step()
    if engine.vtoken:
        engine.drain()
    rows, pool = engine.rows(), engine.scheduler.kv_cache_manager.block_pool
    used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    shared = sum(row["shared"] for row in rows)
    engine.drop_all()
    return {"group": group, "blocks_used": used, "shared_in_rows": shared}


def main() -> None:
    arguments = parser(__doc__, SHAPE).parse_args()
    engine = engine_arguments(9000, max_model_len=20000, max_num_seqs=16)
    arms = [
        Arm("stock", None, arguments.shape, engine),
        Arm("naive", NAIVE, arguments.shape, engine),
        Arm("vtoken", {}, arguments.shape, engine),
    ]
    rows = []
    with side_by_side(arms) as processes:
        for number, name in by_turns(list(processes), arguments.rounds):
            for group in GROUPS:
                row = processes[name].call(share, group, number)
                rows.append({"round": number, "arm": name, **row})
                print(short(rows[-1]), flush=True)
    summary = {}
    for group in GROUPS:
        used = {(r["arm"], r["round"]): r["blocks_used"] for r in rows if r["group"] == group}
        for other in ("stock", "naive"):
            saved = [1 - used["vtoken", i] / used[other, i] for i in range(arguments.rounds)]
            summary[f"reduction_vs_{other}_shared_by_{group}"] = spread(saved)
    config = {"shape": arguments.shape, "rounds": arguments.rounds}
    publish("prefix", Part(config, summary, rows))


if __name__ == "__main__":
    main()
