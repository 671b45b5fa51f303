# SPDX-License-Identifier: Apache-2.0
"""What a decoding step consists of, next to one of stock vLLM over as many tokens.

    python -m benchmarks.steps [--concurrency 8 12 13 16] [--rounds 3]

C requests of 12,288 tokens decode with half of them kept; then stock vLLM decodes C requests that
are as long as what vToken held of each. Steps are timed without the profiler; a second window with
it says what the device did by kind of kernel, and between which kinds it did nothing.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.arms import Arm, ArmProcess, side_by_side
from benchmarks.capacity import BLOCK_SIZE, HALF, SHAPE, engine_arguments, run_load
from benchmarks.command import parser, publish, short
from benchmarks.engine import Engine, Load
from benchmarks.kernels import busy_us, idle_us, traced
from benchmarks.results import Part, spread

PROMPT, OUTPUT = 12288, 4096
BEFORE, TIMED, TRACED = 200, 100, 24


def decode(engine: Engine, concurrency: int, prompt: int, seed: int) -> dict[str, Any]:
    """Times and kernels of decoding steps once every prompt is in."""
    assert engine.llm.reset_prefix_cache()
    step, scheduler = engine.llm.llm_engine.step, engine.scheduler
    for i in range(concurrency):
        engine.send(engine.text(seed * 100 + i, prompt), OUTPUT, {})
    begin, chunks = time.perf_counter(), 0
    while scheduler.waiting or any(request.is_prefill_chunk for request in scheduler.running):
        step()
        chunks += 1
    prefill = time.perf_counter() - begin
    for _ in range(BEFORE):
        step()
    times = [time.perf_counter()]
    for _ in range(TIMED):
        step()
        times.append(time.perf_counter())
    held = [row["blocks"] * BLOCK_SIZE for row in engine.rows()]
    kernels = traced(engine, TRACED)
    engine.drop_all()
    return {
        "concurrency": concurrency,
        "prefill_s": prefill,
        "prefill_steps": chunks,
        "tokens_held": float(np.mean(held)),
        "step_ms": (times[-1] - times[0]) / TIMED * 1e3,
        "step_p50_ms": float(np.median(np.diff(times))) * 1e3,
        "busy_us": {name: us / TRACED for name, us in busy_us(kernels).items()},
        "idle_us": {pair: us / TRACED for pair, us in idle_us(kernels).items()},
    }


def measure(
    processes: dict[str, ArmProcess], concurrencies: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    rows = []
    for number in range(rounds):
        for concurrency in concurrencies:
            prompt = PROMPT
            for name in ("vtoken", "stock"):
                row = processes[name].call(decode, concurrency, prompt, number * 50 + concurrency)
                rows.append({"round": number, "arm": name, **row})
                print(short(rows[-1]), flush=True)
                prompt = round(row["tokens_held"]) - BEFORE - TIMED
    return rows


def main() -> None:
    options = parser(__doc__, SHAPE)
    options.add_argument("--concurrency", type=int, nargs="*", default=[8, 12, 13, 16])
    arguments = options.parse_args()
    pool = 8 * (PROMPT + OUTPUT) // BLOCK_SIZE + 1
    engine = engine_arguments(pool, max_model_len=PROMPT + OUTPUT, max_num_seqs=32)
    arms = [
        Arm("vtoken", HALF | {"theta_f": 0.05}, arguments.shape, engine),
        Arm("stock", None, arguments.shape, engine),
    ]
    with side_by_side(arms) as processes:
        for process in processes.values():
            process.call(run_load, Load(4, 512, 32))  # the first steps compile and allocate
        rows = measure(processes, arguments.concurrency, arguments.rounds)
    took = {(row["round"], row["arm"], row["concurrency"]): row["step_ms"] for row in rows}
    summary = {
        f"step_ratio_vs_stock_c{c}": spread(
            [took[i, "vtoken", c] / took[i, "stock", c] for i in range(arguments.rounds)]
        )
        for c in arguments.concurrency
    }
    config = {"shape": arguments.shape, "prompt": PROMPT, "pool": pool, "steps": TIMED}
    publish("steps", Part(config, summary, rows))


if __name__ == "__main__":
    main()
