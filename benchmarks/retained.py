# SPDX-License-Identifier: Apache-2.0
"""How many blocks requests keep: the paper's Figure 7 (retained blocks).

    python -m benchmarks.retained [--rounds 3]
    python -m benchmarks.retained --shape MODEL_FOLDER --policies h2o scissorhands

16 requests of different lengths, half of the tokens kept. Policies that look at attention need a
real model; its text is real, too. After some hundred steps their rows are
looked at: with naive eviction, and with vToken, each after ``reclaim_now()``. F is the share of the
held slots without a live token; ``half_empty`` the share of blocks at most half full.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.arms import Arm, by_turns, side_by_side
from benchmarks.capacity import NAIVE, SHAPE, engine_arguments
from benchmarks.command import parser, publish, short
from benchmarks.engine import Engine
from benchmarks.results import Part, spread
from vtoken.policy import make_policy

POLICIES = ("random", "streaming_llm")
PROMPTS = [1000 + 390 * i for i in range(16)]
STEPS = 600


def grown(engine: Engine, policy: str, seed: int) -> dict[str, Any]:
    """Let requests of many lengths grow, reclaim what can be, and look at their rows."""
    options = {"policy": policy, "keep_ratio": 0.5, "seed": seed}
    for i, length in enumerate(PROMPTS):
        engine.send(engine.text(seed * 100 + i, length), 2 * STEPS, options)
    for _ in range(STEPS):
        engine.llm.llm_engine.step()
    if engine.vtoken:
        engine.drain()
    rows = engine.rows()
    engine.drop_all()
    held, ideal, live = (sum(row[key] for row in rows) for key in ("blocks", "ideal", "live"))
    return {
        "policy": policy,
        "blocks": held,
        "ideal": ideal,
        "F": 1 - live / (held * engine.scheduler.block_size),
        "half_empty": sum(row["half_empty"] for row in rows) / held,
        "requests": rows,
    }


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    here = {(row["round"], row["arm"], row["policy"]): row for row in rows}
    rounds = sorted({row["round"] for row in rows})
    summary: dict[str, dict[str, float]] = {}
    for policy in dict.fromkeys(row["policy"] for row in rows):
        ours = [here[i, "vtoken", policy] for i in rounds]
        naive = [here[i, "naive", policy] for i in rounds]
        pairs = list(zip(ours, naive, strict=True))
        of_naive = f"reduction_vs_naive_{policy}"
        if policy not in POLICIES:
            of_naive = f"{policy}_reduction_vs_naive"
        summary |= {
            f"blocks_over_ideal_{policy}": spread([row["blocks"] / row["ideal"] for row in ours]),
            of_naive: spread([1 - a["blocks"] / b["blocks"] for a, b in pairs]),
        }
        for arm, found in (("vtoken", ours), ("naive", naive)):
            summary[f"F_{arm}_{policy}"] = spread([row["F"] for row in found])
            summary[f"half_empty_{arm}_{policy}"] = spread([row["half_empty"] for row in found])
    return summary


def main() -> None:
    options = parser(__doc__, SHAPE)
    options.add_argument("--policies", nargs="*", default=list(POLICIES))
    arguments = options.parse_args()
    engine = engine_arguments(5000, max_model_len=8192, max_num_seqs=32)
    looks = {"probe": any(make_policy(name, 0, 0).signals for name in arguments.policies)}
    arms = [
        Arm("naive", NAIVE | looks, arguments.shape, engine),
        Arm("vtoken", looks, arguments.shape, engine),
    ]
    rows = []
    with side_by_side(arms) as processes:
        for number, arm in by_turns(list(processes), arguments.rounds):
            for policy in arguments.policies:
                row = processes[arm].call(grown, policy, number)
                rows.append({"round": number, "arm": arm, **row})
                print(short(rows[-1]), flush=True)
    summary = summarise(rows)
    config = {
        "shape": Path(arguments.shape).name,
        "rounds": arguments.rounds,
        "prompts": PROMPTS,
        "steps": STEPS,
    }
    publish("retained", Part(config, summary, rows, "-".join(arguments.policies)))


if __name__ == "__main__":
    main()
