# SPDX-License-Identifier: Apache-2.0
"""What the hooks, the reclaims and the copies cost, and what shorter attention earns.

    python -m benchmarks.overhead hooks [--concurrency 16 48 256] [--rounds 5]
    python -m benchmarks.overhead probe [--rounds 5]
    python -m benchmarks.overhead ample [--rounds 3]
    python -m benchmarks.overhead async [--rounds 3]
    python -m benchmarks.overhead copies

hooks: stock vLLM against our engine with nothing evicted, closed loop of C requests. probe: the
same at 48 with H2O: measured and scored at each tick, half of the tokens dead, and nothing
reclaimed, since memory is ample: all of its cost and none of its gain. ample: memory for
everything, 64 requests at a time of 1,024 + 1,024 tokens, budget 512. async: the same with many
reclaims (theta_f 0.05), copies that the host only issues against copies that it waits for (the
paper's Figure 11) and against reclaiming in place, and how long the device waits at commits.
copies: bandwidth of the copy engine on an idle device (bytes read and written) against a plain
copy's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.arms import Arm, measured_by_turns, side_by_side
from benchmarks.capacity import BUDGET, SHAPE, engine_arguments, run_load
from benchmarks.command import parser, publish
from benchmarks.copies import measure_copies, timing_event
from benchmarks.engine import Engine, Load
from benchmarks.results import Part, spread

# C -> requests of 256 + 512 tokens that keep it busy for 20 s or more
LOADS = {16: 128, 48: 336, 256: 768}
ALL_MEMORY = 9000


def measure_hooks(concurrencies: Sequence[int], rounds: int, shape: str) -> list[dict[str, Any]]:
    arguments = engine_arguments(13000, max_model_len=2048, max_num_seqs=256)
    arms = [Arm("stock", None, shape, arguments), Arm("vtoken", {}, shape, arguments)]
    rows: list[dict[str, Any]] = []
    with side_by_side(arms) as processes:
        for concurrency in concurrencies:
            found = measured_by_turns(processes, rounds, run_load, loads_of(concurrency))
            rows += [{"concurrency": concurrency, **row} for row in found]
    return rows


def loads_of(concurrency: int) -> Callable[[int], list[Load]]:
    """A closed loop of so many requests, another text each round."""
    return lambda number: [Load(LOADS[concurrency], 256, 512, concurrency, seed=number)]


def measure_probe(rounds: int, shape: str) -> list[dict[str, Any]]:
    arguments = engine_arguments(13000, max_model_len=2048, max_num_seqs=256)
    looks = {"policy": "h2o", "keep_ratio": 0.5, "reclaim": "pressure"}
    arms = [Arm("stock", None, shape, arguments), Arm("h2o", looks, shape, arguments)]
    with side_by_side(arms) as processes:
        return measured_by_turns(processes, rounds, run_load, loads_of(48))


def summary_of_probe(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    here = {(row["round"], row["arm"]): row["tokens_per_s"] for row in rows}
    rounds = sorted({number for number, _ in here})
    ratios = [here[i, "h2o"] / here[i, "stock"] for i in rounds]
    return {"probe_throughput_ratio_c48": spread(ratios)}


def summary_of_hooks(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    summary = {}
    for concurrency in sorted({row["concurrency"] for row in rows}):
        here = {(r["round"], r["arm"]): r for r in rows if r["concurrency"] == concurrency}
        rounds = sorted({number for number, _ in here})
        for key, field in (("throughput", "tokens_per_s"), ("p95", "latency_p95_s")):
            ratios = [here[i, "vtoken"][field] / here[i, "stock"][field] for i in rounds]
            summary[f"{key}_ratio_hooks_only_c{concurrency}"] = spread(ratios)
    return summary


def measure_ample(rounds: int, shape: str) -> list[dict[str, Any]]:
    arguments = engine_arguments(ALL_MEMORY, max_model_len=4096, max_num_seqs=64)
    arms = [
        Arm("stock", None, shape, arguments),
        Arm("eager", BUDGET, shape, arguments),
        Arm("pressure", BUDGET | {"reclaim": "pressure"}, shape, arguments),
    ]
    with side_by_side(arms) as processes:
        for arm in processes.values():
            arm.call(run_load, Load(4, 512, 32))
        return measured_by_turns(
            processes, rounds, run_load, lambda number: [Load(192, 1024, 1024, seed=number)]
        )


def summary_of_ample(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    here = {(row["round"], row["arm"]): row for row in rows}
    speed = {at: row["tokens_per_s"] for at, row in here.items()}
    rounds = sorted({number for number, _ in here})
    keys = {"eager": "ample_memory_ratio", "pressure": "ample_memory_ratio_pressure"}
    summary = {
        key: spread([speed[i, arm] / speed[i, "stock"] for i in rounds])
        for arm, key in keys.items()
    }
    commits = [here[i, "eager"]["plans_committed"] for i in rounds]
    return summary | {"commits_ample_memory": spread(commits)}


def copies_of(engine: Engine) -> Any:
    (runner,) = engine.llm.collective_rpc(lambda worker: worker.model_runner)
    return runner.shard.engine


def wait_for_copies(engine: Engine) -> None:
    """From now on the host waits for every copy that it starts."""
    copies = copies_of(engine)
    start = copies.start

    def start_and_wait(plans: Any) -> None:
        start(plans)
        copies.stream.synchronize()

    copies.start = start_and_wait


def time_commits(engine: Engine) -> None:
    """From now on note how long the device waits where a commit makes it wait for a copy."""
    copies = copies_of(engine)
    wait, copies.waits = copies.wait, []

    def timed(plan_id: int) -> None:
        begin, end = timing_event(), timing_event()
        begin.record()
        wait(plan_id)
        end.record()
        copies.waits.append((begin, end))

    copies.wait = timed


def run_timed(engine: Engine, load: Load) -> dict[str, Any]:
    """``run_load``, with the 99th percentile of those waits, in microseconds, if they are noted."""
    import torch

    row, copies = engine.run(load), copies_of(engine)
    if found := getattr(copies, "waits", None):
        torch.cuda.synchronize()
        stalls = [begin.elapsed_time(end) * 1e3 for begin, end in found]
        row["commit_stall_us_p99"] = float(np.percentile(stalls, 99))
        found.clear()
    return row


def measure_async(rounds: int, shape: str) -> list[dict[str, Any]]:
    arguments = engine_arguments(ALL_MEMORY, max_model_len=4096, max_num_seqs=64)
    often = BUDGET | {"theta_f": 0.05}
    arms = [
        Arm("async", often, shape, arguments),
        Arm("sync", often, shape, arguments),
        Arm("in_place", often | {"backend": "hole_filling"}, shape, arguments),
    ]
    with side_by_side(arms) as processes:
        processes["sync"].call(wait_for_copies)
        processes["async"].call(time_commits)
        for arm in processes.values():
            arm.call(run_load, Load(4, 512, 32))
        return measured_by_turns(
            processes, rounds, run_timed, lambda number: [Load(128, 1024, 1024, seed=number)]
        )


def summary_of_async(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    speed = {(row["round"], row["arm"]): row["tokens_per_s"] for row in rows}
    rounds = sorted({number for number, _ in speed})
    stalls = [row["commit_stall_us_p99"] for row in rows if row["arm"] == "async"]
    return {"commit_stall_us_p99": spread(stalls)} | {
        f"async_ratio_to_{other}": spread([speed[i, "async"] / speed[i, other] for i in rounds])
        for other in ("sync", "in_place")
    }


def main() -> None:
    options = parser(__doc__, SHAPE, rounds=5)
    options.add_argument("part", choices=["hooks", "probe", "ample", "async", "copies"])
    options.add_argument("--concurrency", type=int, nargs="*", choices=LOADS, default=list(LOADS))
    arguments = options.parse_args()
    part, rounds, shape = arguments.part, arguments.rounds, arguments.shape
    if part == "hooks":
        rows = measure_hooks(arguments.concurrency, rounds, shape)
        part = "-".join(["hooks", *map(str, arguments.concurrency)])
        summary = summary_of_hooks(rows)
    elif part == "probe":
        rows = measure_probe(rounds, shape)
        summary = summary_of_probe(rows)
    elif part == "ample":
        rows = measure_ample(rounds, shape)
        summary = summary_of_ample(rows)
    elif part == "async":
        rows = measure_async(rounds, shape)
        summary = summary_of_async(rows)
    else:
        rows, summary = measure_copies()
    publish("overhead", Part({"shape": shape, "rounds": rounds}, summary, rows, part))


if __name__ == "__main__":
    main()
