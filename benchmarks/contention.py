# SPDX-License-Identifier: Apache-2.0
"""The same with somebody else on the device: a process that multiplies matrices all the time.

    python -m benchmarks.contention [--rounds 3]

64 requests of 1,024 + 512 tokens, budget 512, memory ample, stock vLLM against vToken; first alone,
then beside the other process. The paper has no such measurement.
"""

import multiprocessing
import time
from typing import Any

from benchmarks.arms import Arm, measured_by_turns, side_by_side
from benchmarks.capacity import BUDGET, SHAPE, engine_arguments, run_load
from benchmarks.command import parser, publish
from benchmarks.engine import Load
from benchmarks.results import Part, spread

LOAD = (64, 1024, 512)


def multiply(ready: Any) -> None:
    """Matrix products without end."""
    import torch

    a = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    b = torch.randn_like(a)
    for count in range(2**62):
        torch.mm(a, b)
        if count % 64 == 0:
            torch.cuda.synchronize()
            ready.set()


def main() -> None:
    arguments = parser(__doc__, SHAPE).parse_args()
    engine = engine_arguments(9000, max_model_len=4096, max_num_seqs=64)
    arms = [
        Arm("stock", None, arguments.shape, engine),
        Arm("vtoken", BUDGET, arguments.shape, engine),
    ]
    rows: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    with side_by_side(arms) as processes:
        for arm in processes.values():
            arm.call(run_load, Load(4, 512, 32))
        for crowded in (False, True):
            ready = context.Event()
            other = context.Process(target=multiply, args=(ready,), daemon=True)
            if crowded:
                other.start()
                assert ready.wait(timeout=60), "the other process does not run"
                time.sleep(1)
            found = measured_by_turns(
                processes, arguments.rounds, run_load, lambda number: [Load(*LOAD, seed=number)]
            )
            rows += [{"crowded": crowded, **row} for row in found]
            if crowded:
                assert other.is_alive(), "the other process has ended"
                other.kill()
    speed = {(r["crowded"], r["arm"], r["round"]): r["tokens_per_s"] for r in rows}
    rounds = range(arguments.rounds)
    summary = {
        f"ratio_vs_stock_{label}": spread(
            [speed[crowded, "vtoken", i] / speed[crowded, "stock", i] for i in rounds]
        )
        for crowded, label in ((False, "alone"), (True, "crowded"))
    }
    config = {"shape": arguments.shape, "rounds": arguments.rounds, "load": LOAD}
    publish("contention", Part(config, summary, rows))


if __name__ == "__main__":
    main()
