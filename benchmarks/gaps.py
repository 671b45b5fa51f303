# SPDX-License-Identifier: Apache-2.0
"""When a device does nothing between the kernels of a decoding step.

    python -m benchmarks.gaps

The time between two kernels of a CUDA graph should depend on nothing, but ``benchmarks.steps``
sees it grow at some concurrencies. One state of the engine after another is looked at, stock
vLLM's too, with the device's clocks beside it: long prompts, many requests, a shuffled pool,
eviction, and what is left of it once a request's policy has ended. No bar hangs on it.
"""

import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.arms import Arm, ArmProcess, side_by_side
from benchmarks.capacity import BLOCK_SIZE, HALF, SHAPE, engine_arguments, run_load
from benchmarks.command import parser, publish, short
from benchmarks.engine import Engine, Load
from benchmarks.results import Part, once
from benchmarks.steps import BEFORE, OUTPUT, PROMPT, arrange_free_blocks, look, prefill

LONG = 1000
KEPT = PROMPT // 2 + 300
ALL: dict[str, Any] = {"policy": "keep_all"}
# (name, arm, load, shuffled)
STATES: Sequence[tuple[str, str, Load, bool]] = (
    ("short prompts", "stock", Load(12, KEPT, OUTPUT), False),
    ("short prompts, shuffled", "stock", Load(12, KEPT, OUTPUT), True),
    ("long prompts", "stock", Load(12, PROMPT, OUTPUT), False),
    ("hooks only", "vtoken", Load(12, KEPT, OUTPUT, options=ALL), False),
    ("half kept of 8", "vtoken", Load(8, PROMPT, OUTPUT), False),
    ("half kept of 9", "vtoken", Load(9, PROMPT, OUTPUT), False),
    ("half kept of 12", "vtoken", Load(12, PROMPT, OUTPUT), False),
    ("half kept of 12, shorter", "vtoken", Load(12, PROMPT * 2 // 3, OUTPUT), False),
)
CLOCKS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_event_reasons.active")


def look_at(engine: Engine, load: Load, shuffled: bool) -> list[dict[str, Any]]:
    """Soon after the prefill, long after it, and with nothing evicted any more."""
    arrange_free_blocks(engine, shuffled, load.seed)
    begin = prefill(engine, load)
    rows = [{"when": "soon", **begin, **with_clocks(engine, BEFORE)}]
    rows.append({"when": "later", **with_clocks(engine, LONG)})
    if engine.vtoken:
        for request in engine.scheduler.reclaimer.requests.values():
            request.is_over = True
        rows.append({"when": "no more evictions", **with_clocks(engine, BEFORE)})
    engine.drop_all()
    return rows


def with_clocks(engine: Engine, before: int) -> dict[str, Any]:
    with tempfile.TemporaryFile("w+") as out:
        query = ["nvidia-smi", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader"]
        watcher = subprocess.Popen([*query, "--loop-ms=200"], stdout=out)
        try:
            row = look(engine, before)
        finally:
            watcher.terminate()
            watcher.wait()
        out.seek(0)
        return {**row, "clocks": out.read().splitlines()}


def measure(processes: dict[str, ArmProcess]) -> list[dict[str, Any]]:
    rows = []
    for seed, (name, arm, load, shuffled) in enumerate(STATES):
        for row in processes[arm].call(look_at, replace(load, seed=seed), shuffled):
            idle = sum(row["idle_us"].values())
            rows.append({"state": name, "arm": arm, "idle_us_in_all": idle, **row})
            print(short(rows[-1]), row["clocks"][-3:-2], flush=True)
    return rows


def main() -> None:
    arguments = parser(__doc__, SHAPE).parse_args()
    pool = 13 * (PROMPT + OUTPUT) // BLOCK_SIZE + 1
    engine = engine_arguments(pool, max_model_len=PROMPT + OUTPUT, max_num_seqs=32)
    arms = [
        Arm("vtoken", HALF | {"theta_f": 0.05}, arguments.shape, engine),
        Arm("stock", None, arguments.shape, engine),
    ]
    with side_by_side(arms) as processes:
        for process in processes.values():
            process.call(run_load, Load(4, 512, 32))  # the first steps compile and allocate
        rows = measure(processes)
    summary = {f"idle_us {r['state']}, {r['when']}": once(r["idle_us_in_all"]) for r in rows}
    publish("gaps", Part({"shape": arguments.shape, "pool": pool}, summary, rows))


if __name__ == "__main__":
    main()
