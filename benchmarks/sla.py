# SPDX-License-Identifier: Apache-2.0
"""Throughput under a latency target: the paper's Figure 8.

    python -m benchmarks.sla [--concurrency 10 12 14 15 16] [--rounds 3]

Requests of 12,288 + 4,096 tokens in a closed loop, half of the tokens kept, a pool of 8 full
requests. The target is 1.05 times naive eviction's p95 request latency at a concurrency of 8. Each
arm's best throughput that meets it is compared, round by round.
"""

from typing import Any

from benchmarks.arms import Arm, ArmProcess, side_by_side
from benchmarks.capacity import HALF, NAIVE, SHAPE, engine_arguments, run_load
from benchmarks.command import parser, publish, short
from benchmarks.engine import Load
from benchmarks.results import Part, spread

PROMPT, OUTPUT = 12288, 4096
POOL = 8 * (PROMPT + OUTPUT) // 16 + 1  # vLLM's null block is nobody's
SLACK = 1.05


def sweep(arm: ArmProcess, concurrencies: list[int], target: float | None) -> list[dict[str, Any]]:
    """One run per concurrency, ascending, until one misses the target (None: the first sets it)."""
    rows = []
    for concurrency in concurrencies:
        load = Load(concurrency, PROMPT, OUTPUT, concurrency, seed=concurrency)
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
    arguments = options.parse_args()
    engine = engine_arguments(POOL, max_model_len=PROMPT + OUTPUT, max_num_seqs=32)
    arms = [
        Arm("naive", HALF | NAIVE, arguments.shape, engine),
        Arm("vtoken", HALF, arguments.shape, engine),
    ]
    rows: list[dict[str, Any]] = []
    with side_by_side(arms) as processes:
        for number in range(arguments.rounds):
            naive = sweep(processes["naive"], [8, 9], None)
            ours = sweep(processes["vtoken"], arguments.concurrency, naive[0]["target"])
            rows += [{"round": number, **row} for row in (*naive, *ours)]
    speedups, most = [], []
    for number in range(arguments.rounds):
        here = [row for row in rows if row["round"] == number]
        naive, ours = ([r for r in here if r["arm"] == name] for name in ("naive", "vtoken"))
        speedups.append(best(ours) / best(naive))
        most.append(max((r["concurrency"] for r in ours if r["meets"]), default=0))
    summary = {"sla_speedup_random": spread(speedups), "sla_concurrency_random": spread(most)}
    config = {"shape": arguments.shape, "rounds": arguments.rounds, "pool": POOL}
    publish("sla", Part(config, summary, rows))


if __name__ == "__main__":
    main()
