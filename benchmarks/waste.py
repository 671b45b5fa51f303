# SPDX-License-Identifier: Apache-2.0
"""Memory that eviction sets free and nobody gets: the paper's Figure 1.

    python -m benchmarks.waste [--rounds 3]

16 requests grow from 256 to about 2,300 tokens with half of them kept. Every 256 steps: F, the
share of the held slots without a live token, and the share of blocks at most half full, by policy.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.arms import Arm, by_turns, side_by_side
from benchmarks.capacity import NAIVE, SHAPE, engine_arguments
from benchmarks.command import parser, publish, short
from benchmarks.engine import Engine
from benchmarks.results import Part, spread

POLICIES = ("keep_all", "random", "streaming_llm")
REQUESTS, PROMPT, STEPS, EVERY = 16, 256, 2048, 256


def grow(engine: Engine, policy: str, seed: int) -> list[dict[str, Any]]:
    """One row of a table per ``EVERY`` steps."""
    options: dict[str, Any] = {"policy": policy, "seed": seed}
    if policy != "keep_all":
        options["keep_ratio"] = 0.5
    for i in range(REQUESTS):
        engine.send(engine.text(seed * 100 + i, PROMPT), STEPS + 100, options)
    found = []
    for step in range(1, STEPS + 1):
        engine.llm.llm_engine.step()
        if step % EVERY == 0:
            rows = engine.rows()
            held, live = sum(row["blocks"] for row in rows), sum(row["live"] for row in rows)
            found.append(
                {
                    "length": rows[0]["length"],
                    "F": 1 - live / (held * engine.scheduler.block_size),
                    "half_empty": sum(row["half_empty"] for row in rows) / held,
                }
            )
    engine.drop_all()
    return found


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The last look of each run, when the requests are longest."""
    summary, last = {}, max(row["length"] for row in rows) - EVERY // 2
    for arm in ("naive", "vtoken"):
        for policy in POLICIES:
            found = [r for r in rows if (r["arm"], r["policy"]) == (arm, policy)]
            for key in ("F", "half_empty"):
                values = [row[key] for row in found if row["length"] > last]
                summary[f"{key}_{arm}_{policy}"] = spread(values)
    return summary


def main() -> None:
    options = parser(__doc__, SHAPE)
    arguments = options.parse_args()
    engine = engine_arguments(2800, max_model_len=4096, max_num_seqs=32)
    arms = [
        Arm("naive", NAIVE, arguments.shape, engine),
        Arm("vtoken", {"reclaim": "eager"}, arguments.shape, engine),
    ]
    rows = []
    with side_by_side(arms) as processes:
        for number, arm in by_turns(list(processes), arguments.rounds):
            for policy in POLICIES:
                for row in processes[arm].call(grow, policy, number):
                    rows.append({"round": number, "arm": arm, "policy": policy, **row})
                print(short(rows[-1]), flush=True)
    summary = summarise(rows)
    config = {"shape": arguments.shape, "rounds": arguments.rounds, "steps": STEPS}
    publish("waste", Part(config, summary, rows))


if __name__ == "__main__":
    main()
