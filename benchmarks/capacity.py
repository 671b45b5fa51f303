# SPDX-License-Identifier: Apache-2.0
"""What a pool of blocks serves: throughput when it is short, and how many requests fit at once.

    python -m benchmarks.capacity 2048 [--against stock naive unlimited] [--rounds 3]
    python -m benchmarks.capacity 5427 | 11519 --rounds 1, or 1357 | 2880 [--rounds 3]
    python -m benchmarks.capacity 2048 | 1357 | ... --check

The first runs 256 requests of 1,024 + 1,024 tokens through 2,048 blocks: the paper's policy
`random` with a budget of 512. ``unlimited`` is stock vLLM with memory for all 64 of its running
requests. The others are the paper's Figures 9 and 10: the largest number of requests that all run
in one step and finish without a preemption. ``--check`` runs vToken alone, once, as slow as it is
with its invariants checked at every step: what is broken ends the engine, or a rank refuses it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.arms import Arm, ArmProcess, by_turns, measured_by_turns, side_by_side
from benchmarks.command import parser, publish, short
from benchmarks.engine import Engine, Load, Watch
from benchmarks.results import Part, once, spread

SHAPE = "llama-3.1-8b"
BLOCK_SIZE = 16
BUDGET = {"policy": "random", "budget_tokens": 512, "reclaim": "eager"}
HALF = {"policy": "random", "keep_ratio": 0.5, "reclaim": "eager"}
NAIVE = {"backend": "whole_blocks", "reclaim": "eager", "theta_f": 0.0}  # dead blocks, at once
UNLIMITED_BLOCKS = 9000
PATIENCE = 2000  # steps

# blocks -> (vToken's headroom, numbers of requests to try, for vToken and for the others)
FIGURES = {
    5427: (0.02, (10, 11), (5, 6)),
    11519: (0.01, (22, 23), (11, 12)),
}
QUARTERS = {
    1357: (0.02, (10, 11), (5, 6)),
    2880: (0.02, (21, 22), (11, 12)),
}


def engine_arguments(num_blocks: int, max_model_len: int, max_num_seqs: int) -> dict[str, Any]:
    return {
        "dtype": "bfloat16",
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": num_blocks,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
    }


# -- a pool that is short --------------------------------------------------------------------------


def arms_of_2048(names: Sequence[str], shape: str) -> list[Arm]:
    limited = engine_arguments(2048, max_model_len=4096, max_num_seqs=64)
    known = {
        "stock": Arm("stock", None, shape, limited),
        "naive": Arm("naive", BUDGET | NAIVE, shape, limited),
        "vtoken": Arm("vtoken", BUDGET, shape, limited),
        "unlimited": Arm(
            "unlimited", None, shape, limited | {"num_gpu_blocks_override": UNLIMITED_BLOCKS}
        ),
    }
    return [known[name] for name in names]


def measure_2048(names: Sequence[str], rounds: int, shape: str) -> list[dict[str, Any]]:
    with side_by_side(arms_of_2048(names, shape)) as arms:
        for arm in arms.values():
            arm.call(run_load, Load(4, 512, 32))  # the first steps compile and allocate
        return measured_by_turns(
            arms, rounds, run_load, lambda number: [Load(256, 1024, 1024, seed=number)]
        )


def run_load(engine: Engine, load: Load) -> dict[str, Any]:
    return engine.run(load)


def summary_of_2048(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    rounds = sorted({row["round"] for row in rows})
    speed = {(row["round"], row["arm"]): row["tokens_per_s"] for row in rows}
    names = {"stock": "speedup_vs_stock", "naive": "speedup_vs_naive"}
    names["unlimited"] = "fraction_of_unlimited"
    summary = {
        f"{key}_2048": spread([speed[i, "vtoken"] / speed[i, arm] for i in rounds])
        for arm, key in names.items()
        if (0, arm) in speed
    }
    for arm in sorted({row["arm"] for row in rows}):
        ours = [row for row in rows if row["arm"] == arm]
        summary[f"preemptions_{arm}_2048"] = spread([row["preemptions"] for row in ours])
        summary[f"tokens_per_s_{arm}_2048"] = spread([row["tokens_per_s"] for row in ours])
    return summary


# -- how many fit at once --------------------------------------------------------------------------


def feasible(engine: Engine, load: Load) -> dict[str, Any]:
    """Whether all of a load's requests run in one step and finish without a preemption."""

    def hopeless(watch: Watch) -> bool:
        # Admission counts full lengths, so who waits that long waits for somebody's end.
        late = watch.steps - watch.last_growth > PATIENCE or bool(watch.latencies)
        return watch.preemptions > 0 or (watch.max_running < load.num_requests and late)

    row = engine.run(load, stop=hopeless)
    fits = row["max_running"] == load.num_requests and not row["preemptions"]
    return {"requests": load.num_requests, "feasible": fits, **row}


def largest(arm: ArmProcess, tries: Sequence[int], quarter: bool) -> tuple[int, list[Any]]:
    """The largest number of requests that fits, of those tried in ascending order."""
    best, rows = 0, []
    for count in tries:
        lengths = (1080, 3000) if quarter else (4320, 12000)
        rows.append({"arm": arm.name, **arm.call(feasible, Load(count, *lengths))})
        print(short(rows[-1]), flush=True)
        if not rows[-1]["feasible"]:
            break
        best = count
    return best, rows


def arms_of_figures(blocks: int, shape: str) -> list[Arm]:
    quarter = blocks in QUARTERS
    headroom = (QUARTERS if quarter else FIGURES)[blocks][0]
    arguments = engine_arguments(blocks, max_model_len=4096 if quarter else 16384, max_num_seqs=32)
    return [
        Arm("stock", None, shape, arguments),
        Arm("naive", HALF | NAIVE | {"headroom": headroom}, shape, arguments),
        Arm("vtoken", HALF | {"headroom": headroom}, shape, arguments),
    ]


def measure_figures(blocks: int, rounds: int, shape: str) -> tuple[list[Any], dict[str, Any]]:
    quarter = blocks in QUARTERS
    _, ours, theirs = (QUARTERS if quarter else FIGURES)[blocks]
    arms = arms_of_figures(blocks, shape)
    found: dict[str, list[float]] = {arm.name: [] for arm in arms}
    rows: list[Any] = []
    with side_by_side(arms) as processes:
        for number, name in by_turns(list(found), rounds):
            tries = ours if name == "vtoken" else theirs
            best, new = largest(processes[name], tries, quarter)
            found[name].append(best)
            rows += [{"round": number, **row} for row in new]
    # The full shapes are long: one run of them is enough, and three of a quarter.
    summary = {
        f"max_concurrency_{name}_{blocks}": spread(values) if rounds > 1 else once(values[0])
        for name, values in found.items()
    }
    return rows, summary


def check(blocks: int, shape: str) -> tuple[list[Any], dict[str, Any]]:
    """The whole load of vToken once, checked."""
    arms = arms_of_2048(["vtoken"], shape) if blocks == 2048 else arms_of_figures(blocks, shape)
    arm = replace(arms[-1], options={**(arms[-1].options or {}), "check": True})
    with side_by_side([arm]) as processes:
        if blocks == 2048:
            row = processes["vtoken"].call(run_load, Load(256, 1024, 1024))
        else:
            quarter = blocks in QUARTERS
            tries = (QUARTERS if quarter else FIGURES)[blocks][1]
            (row, *_) = largest(processes["vtoken"], tries[:1], quarter)[1]
    return [row], {f"plans_refused_checked_{blocks}": once(row["plans_refused"])}


def main() -> None:
    options = parser(__doc__, SHAPE)
    options.add_argument("blocks", type=int, choices=[2048, *FIGURES, *QUARTERS])
    everybody = ["stock", "naive", "unlimited"]
    options.add_argument("--against", nargs="*", choices=everybody, default=everybody)
    options.add_argument("--check", action="store_true")
    arguments = options.parse_args()
    blocks, rounds = arguments.blocks, arguments.rounds
    if arguments.check:
        rows, summary = check(blocks, arguments.shape)
    elif blocks == 2048:
        rows = measure_2048(["vtoken", *arguments.against], rounds, arguments.shape)
        summary = summary_of_2048(rows)
    else:
        rows, summary = measure_figures(blocks, rounds, arguments.shape)
    config = {"shape": arguments.shape, "rounds": rounds, "blocks": blocks}
    name = f"{blocks}-{'-'.join(arguments.against)}" if blocks == 2048 else str(blocks)
    name = f"{blocks}-checked" if arguments.check else name
    publish("capacity", Part(config, summary, rows, name))


if __name__ == "__main__":
    main()
