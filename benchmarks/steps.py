# SPDX-License-Identifier: Apache-2.0
"""What a decoding step consists of, next to one of stock vLLM over as many tokens.

    python -m benchmarks.steps [--concurrency 8 12 13 16] [--rounds 3]

C requests of 12,288 tokens decode with half of them kept; then stock vLLM decodes C requests that
are as long as what vToken held of each: once on a new pool, whose blocks it takes in the order of
their addresses, and once with the free blocks shuffled, as they are after some hours. Steps are
timed without the profiler; a second window with it says what the device did by kind of kernel, and
between which kinds it did nothing.
"""

import random
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


ARMS = ("vtoken", "stock", "stock, shuffled")


def arrange_free_blocks(engine: Engine, shuffled: bool, seed: int) -> None:
    """By address, or at random. Nothing must run."""
    assert engine.llm.reset_prefix_cache()
    queue = engine.scheduler.kv_cache_manager.block_pool.free_block_queue
    blocks = sorted(queue.popleft_n(queue.num_free_blocks), key=lambda block: block.block_id)
    if shuffled:
        random.Random(seed).shuffle(blocks)
    queue.append_n(blocks)


def prefill(engine: Engine, load: Load) -> dict[str, Any]:
    """Send all requests of a load and step until every prompt is in."""
    step, scheduler = engine.llm.llm_engine.step, engine.scheduler
    for i in range(load.num_requests):
        tokens = engine.text(load.seed * 100 + i, load.prompt_tokens)
        engine.send(tokens, load.output_tokens, load.options)
    begin, chunks = time.perf_counter(), 0
    while scheduler.waiting or any(request.is_prefill_chunk for request in scheduler.running):
        step()
        chunks += 1
    return {"prefill_s": time.perf_counter() - begin, "prefill_steps": chunks}


def look(engine: Engine, before: int) -> dict[str, Any]:
    """Times and kernels of decoding steps, after so many others."""
    step = engine.llm.llm_engine.step
    for _ in range(before):
        step()
    times = [time.perf_counter()]
    for _ in range(TIMED):
        step()
        times.append(time.perf_counter())
    held = [row["blocks"] * BLOCK_SIZE for row in engine.rows()]
    kernels = traced(engine, TRACED)
    return {
        "concurrency": len(held),
        "tokens_held": float(np.mean(held)),
        "step_ms": (times[-1] - times[0]) / TIMED * 1e3,
        "step_p50_ms": float(np.median(np.diff(times))) * 1e3,
        "busy_us": {name: us / TRACED for name, us in busy_us(kernels).items()},
        "idle_us": {pair: us / TRACED for pair, us in idle_us(kernels).items()},
    }


def decode(engine: Engine, load: Load, shuffled: bool) -> dict[str, Any]:
    arrange_free_blocks(engine, shuffled, load.seed)
    row = prefill(engine, load) | look(engine, BEFORE)
    engine.drop_all()
    return row


def measure(
    processes: dict[str, ArmProcess], concurrencies: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    rows = []
    for number in range(rounds):
        for concurrency in concurrencies:
            prompt, seed = PROMPT, number * 50 + concurrency
            for name in ARMS:
                arm, _, shuffled = name.partition(", ")
                load = Load(concurrency, prompt, OUTPUT, seed=seed)
                row = processes[arm].call(decode, load, bool(shuffled))
                rows.append({"round": number, "arm": name, **row})
                print(short(rows[-1]), flush=True)
                if arm == "vtoken":
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
        f"step_ratio_{key}_c{c}": spread(
            [took[i, arm, c] / took[i, "stock", c] for i in range(arguments.rounds)]
        )
        for c in arguments.concurrency
        for arm, key in (("vtoken", "vs_stock"), ("stock, shuffled", "of_shuffled_blocks"))
    }
    config = {"shape": arguments.shape, "prompt": PROMPT, "pool": pool, "steps": TIMED}
    publish("steps", Part(config, summary, rows))


if __name__ == "__main__":
    main()
