# SPDX-License-Identifier: Apache-2.0
"""Throughput under a latency target: the paper's Figure 8.

    python -m benchmarks.sla [--concurrency 10 12 13 14 15 16] [--rounds 3]
    python -m benchmarks.sla --policy h2o --shape MODEL_FOLDER --tokens 6144 2048

C requests of 12,288 + 4,096 tokens at once, half of the tokens kept, a pool of 8 full requests. The
target is 1.05 times naive eviction's p95 request latency at a concurrency of 8. Each arm's best
throughput that meets it is compared, round by round. The first round tries every concurrency in
ascending order up to the first miss; the others begin one below the best of it.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arms import Arm, ArmProcess, side_by_side
from benchmarks.capacity import BLOCK_SIZE, HALF, NAIVE, SHAPE, engine_arguments, run_load
from benchmarks.command import parser, publish, short
from benchmarks.engine import Engine, Load, Watch
from benchmarks.results import Part, spread

TOKENS = (12288, 4096)
SLACK = 1.05


def run_within(engine: Engine, load: Load, target: float | None) -> dict[str, Any]:
    """Carry out a load, or as much as shows that it misses the target (None: no target)."""
    begin = time.perf_counter()

    def missed(watch: Watch) -> bool:
        waited = time.perf_counter() - begin
        if target is None or waited <= target:
            return False
        going = load.num_requests - len(watch.latencies)
        return float(np.percentile([*watch.latencies, *[waited] * going], 95)) > target

    row = engine.run(load, stop=missed)
    meets = row["finished"] == load.num_requests and (
        target is None or row["latency_p95_s"] <= target
    )
    return {"concurrency": load.num_requests, "meets": meets, **row}


def sweep(
    arm: ArmProcess, concurrencies: list[int], tokens: list[int], target: float | None
) -> list[dict[str, Any]]:
    """One run per concurrency, ascending, until one misses the target (None: the first sets it)."""
    rows = []
    prompt, output = tokens
    for concurrency in concurrencies:
        load = Load(concurrency, prompt, output, seed=concurrency)
        row = arm.call(run_within, load, target)
        target = target or SLACK * row["latency_p95_s"]
        rows.append({"arm": arm.name, "target": target, **row})
        print(short(rows[-1]), flush=True)
        if not row["meets"]:
            break
    return rows


def best(rows: list[dict[str, Any]]) -> float:
    return max((row["tokens_per_s"] for row in rows if row["meets"]), default=0.0)


def measure(
    arms: list[Arm], tries: list[int], tokens: list[int], rounds: int
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with side_by_side(arms) as processes:
        for process in processes.values():
            process.call(run_load, Load(4, 512, 32))  # the first steps compile and allocate
        for number in range(rounds):
            naive = sweep(processes["naive"], [8, 9], tokens, None)
            ours = sweep(processes["vtoken"], tries, tokens, naive[0]["target"])
            rows += [{"round": number, **row} for row in (*naive, *ours)]
            if number == 0:
                met = sum(row["meets"] for row in ours)
                tries = tries[max(0, met - 2) :]
    return rows


def summarise(rows: list[dict[str, Any]], policy: str) -> dict[str, dict[str, float]]:
    speedups, most = [], []
    for number in sorted({row["round"] for row in rows}):
        here = [row for row in rows if row["round"] == number]
        naive, ours = ([r for r in here if r["arm"] == name] for name in ("naive", "vtoken"))
        speedups.append(best(ours) / best(naive))
        most.append(max((r["concurrency"] for r in ours if r["meets"]), default=0))
    return {
        f"sla_speedup_{policy}": spread(speedups),
        f"sla_concurrency_{policy}": spread(most),
    }


def main() -> None:
    options = parser(__doc__, SHAPE)
    options.add_argument("--concurrency", type=int, nargs="*", default=[10, 12, 13, 14, 15, 16])
    options.add_argument("--policy", default="random")
    options.add_argument("--tokens", type=int, nargs=2, default=list(TOKENS), help="in and out")
    arguments = options.parse_args()
    policy, tokens, rounds = arguments.policy, arguments.tokens, arguments.rounds
    pool = 8 * sum(tokens) // BLOCK_SIZE + 1  # vLLM's null block is nobody's
    engine = engine_arguments(pool, max_model_len=sum(tokens), max_num_seqs=32)
    ours = HALF | {"policy": policy}
    arms = [
        Arm("naive", ours | NAIVE, arguments.shape, engine),
        Arm("vtoken", ours, arguments.shape, engine),
    ]
    rows = measure(arms, arguments.concurrency, tokens, rounds)
    shape = Path(arguments.shape).name
    config = {"shape": shape, "rounds": rounds, "pool": pool, "tokens": tokens}
    publish("sla", Part(config, summarise(rows, policy), rows, policy))


if __name__ == "__main__":
    main()
