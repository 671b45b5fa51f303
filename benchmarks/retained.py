# SPDX-License-Identifier: Apache-2.0
"""How many blocks requests keep: the paper's Figures 1 (waste) and 7 (retained blocks).

    python -m benchmarks.retained [--rounds 3]

16 requests of different lengths, half of the tokens kept. Once they have grown to full length, the
rows are looked at: with naive eviction, and with vToken after ``reclaim_now()``. F is the share of
the held slots without a live token; ``half_empty`` the share of blocks at most half full.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.arms import Arm, by_turns, side_by_side
from benchmarks.capacity import NAIVE, SHAPE, engine_arguments, short
from benchmarks.engine import Engine
from benchmarks.results import Part, spread, write_result

POLICIES = ("random", "streaming_llm")
LENGTHS = [1500 + 170 * i for i in range(16)]
PROMPT = 1000


def grown_rows(engine: Engine, policy: str, seed: int) -> dict[str, Any]:
    """Let all requests reach their lengths, reclaim what can be, and look at their rows."""
    options = {"policy": policy, "keep_ratio": 0.5, "seed": seed}
    ids = [engine.send(PROMPT, length, options, seed * 100 + i) for i, length in enumerate(LENGTHS)]
    step, scheduler = engine.llm.llm_engine.step, engine.scheduler
    at_least = dict(zip(ids, LENGTHS, strict=True))
    while any(request.num_tokens < at_least[name(request)] for request in scheduler.running):
        step()
    if engine.vtoken:
        scheduler.reclaimer.reclaim_now()
        while scheduler.reclaimer.planner.draining:
            step()
    rows = [look_at(engine, request) for request in scheduler.running]
    assert len(rows) == len(LENGTHS), "a request has ended or waits"
    engine.llm.llm_engine.abort_request(ids)
    while engine.llm.llm_engine.has_unfinished_requests():
        step()
    held, ideal, live = (sum(row[key] for row in rows) for key in ("blocks", "ideal", "live"))
    return {
        "policy": policy,
        "blocks": held,
        "ideal": ideal,
        "F": 1 - live / (held * engine.scheduler.block_size),
        "half_empty": float(
            np.average([r["half_empty"] for r in rows], weights=[r["blocks"] for r in rows])
        ),
        "requests": rows,
    }


def name(request: Any) -> str:
    return str(request.request_id).rsplit("-", 1)[0]


def look_at(engine: Engine, request: Any) -> dict[str, Any]:
    """One request's row, from vLLM's own blocks and our table's live counts."""
    size = engine.scheduler.block_size
    (manager,) = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    blocks, length = len(manager.req_to_blocks[request.request_id]), request.num_computed_tokens
    counts = np.full(blocks, size)
    live = length
    if engine.vtoken:
        table = engine.scheduler.reclaimer.requests[request.request_id].table
        live = table.num_live + length - table.length
        counts = table.block_live
    return {
        "length": length,
        "live": live,
        "blocks": blocks,
        "ideal": -(-live // size),
        "half_empty": int(np.count_nonzero(counts[:-1] <= size / 2)),  # but the tail
    }


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    here = {(row["round"], row["arm"], row["policy"]): row for row in rows}
    rounds, summary = sorted({row["round"] for row in rows}), {}
    for policy in POLICIES:
        ours = [here[i, "vtoken", policy] for i in rounds]
        naive = [here[i, "naive", policy] for i in rounds]
        pairs = list(zip(ours, naive, strict=True))
        summary |= {
            f"blocks_over_ideal_{policy}": spread([row["blocks"] / row["ideal"] for row in ours]),
            f"reduction_vs_naive_{policy}": spread(
                [1 - a["blocks"] / b["blocks"] for a, b in pairs]
            ),
        }
        for arm, found in (("vtoken", ours), ("naive", naive)):
            summary[f"F_{arm}_{policy}"] = spread([row["F"] for row in found])
            summary[f"half_empty_{arm}_{policy}"] = spread([row["half_empty"] for row in found])
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", default=SHAPE)
    arguments = parser.parse_args()
    engine = engine_arguments(5000, max_model_len=16384, max_num_seqs=32)
    arms = [
        Arm("naive", dict(NAIVE), arguments.shape, engine),
        Arm("vtoken", {}, arguments.shape, engine),
    ]
    rows = []
    with side_by_side(arms) as processes:
        for number, arm in by_turns(list(processes), arguments.rounds):
            for policy in POLICIES:
                row = processes[arm].call(grown_rows, policy, number)
                rows.append({"round": number, "arm": arm, **row})
                print(short({k: v for k, v in rows[-1].items() if k != "requests"}), flush=True)
    summary = summarise(rows)
    config = {"shape": arguments.shape, "rounds": arguments.rounds, "lengths": LENGTHS}
    path = write_result("retained", Part(config, summary, rows))
    print(json.dumps(summary, indent=1))
    print(path.name)


if __name__ == "__main__":
    main()
