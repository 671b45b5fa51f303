# SPDX-License-Identifier: Apache-2.0
"""Throughput under a latency target: the paper's Figure 8.

    python -m benchmarks.sla [--concurrency 10 12 14 15 16] [--rounds 3]
    python -m benchmarks.sla --policy h2o --shape MODEL_FOLDER --tokens 6144 2048

Requests of 12,288 + 4,096 tokens in a closed loop, half of the tokens kept, a pool of 8 full
requests. The target is 1.05 times naive eviction's p95 request latency at a concurrency of 8. Each
arm's best throughput that meets it is compared, round by round.
"""

from pathlib import Path
from typing import Any

from benchmarks.arms import Arm, ArmProcess, side_by_side
from benchmarks.capacity import BLOCK_SIZE, HALF, NAIVE, SHAPE, engine_arguments, run_load
from benchmarks.command import parser, publish, short
from benchmarks.engine import Load
from benchmarks.results import Part, spread

TOKENS = (12288, 4096)
SLACK = 1.05


def sweep(
    arm: ArmProcess, concurrencies: list[int], tokens: list[int], target: float | None
) -> list[dict[str, Any]]:
    """One run per concurrency, ascending, until one misses the target (None: the first sets it)."""
    rows = []
    for concurrency in concurrencies:
        prompt, output = tokens
        load = Load(concurrency, prompt, output, concurrency, seed=concurrency)
        row = {"concurrency": concurrency, **arm.call(run_load, load)}
        target = target or SLACK * row["latency_p95_s"]
        rows.append(
            {"arm": arm.name, "meets": row["latency_p95_s"] <= target, "target": target, **row}
        )
        print(short(rows[-1]), flush=True)
        if not rows[-1]["meets"]:
            break
    return rows


def best(rows: list[dict[str, Any]]) -> float:
    return max((row["tokens_per_s"] for row in rows if row["meets"]), default=0.0)


def main() -> None:
    options = parser(__doc__, SHAPE)
    options.add_argument("--concurrency", type=int, nargs="*", default=[10, 12, 14, 15, 16])
    options.add_argument("--policy", default="random")
    options.add_argument("--tokens", type=int, nargs=2, default=list(TOKENS), help="in and out")
    arguments = options.parse_args()
    policy, tokens = arguments.policy, arguments.tokens
    pool = 8 * sum(tokens) // BLOCK_SIZE + 1  # vLLM's null block is nobody's
    engine = engine_arguments(pool, max_model_len=sum(tokens), max_num_seqs=32)
    ours = HALF | {"policy": policy}
    arms = [
        Arm("naive", ours | NAIVE, arguments.shape, engine),
        Arm("vtoken", ours, arguments.shape, engine),
    ]
    rows: list[dict[str, Any]] = []
    with side_by_side(arms) as processes:
        for number in range(arguments.rounds):
            naive = sweep(processes["naive"], [8, 9], tokens, None)
            target = naive[0]["target"]
            found = sweep(processes["vtoken"], arguments.concurrency, tokens, target)
            rows += [{"round": number, **row} for row in (*naive, *found)]
    speedups, most = [], []
    for number in range(arguments.rounds):
        here = [row for row in rows if row["round"] == number]
        naive, found = ([r for r in here if r["arm"] == name] for name in ("naive", "vtoken"))
        speedups.append(best(found) / best(naive))
        most.append(max((r["concurrency"] for r in found if r["meets"]), default=0))
    summary = {
        f"sla_speedup_{policy}": spread(speedups),
        f"sla_concurrency_{policy}": spread(most),
    }
    shape = Path(arguments.shape).name
    config = {"shape": shape, "rounds": arguments.rounds, "pool": pool, "tokens": tokens}
    publish("sla", Part(config, summary, rows, policy))


if __name__ == "__main__":
    main()
