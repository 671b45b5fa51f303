# SPDX-License-Identifier: Apache-2.0
"""What the device does while a plan is copied: every kernel, from torch's profiler.

    python -m benchmarks.profile_step

64 requests decode with a budget of 512 and theta_f 0.05, so that plans of some hundred tokens are
under way all the time. The rows are the kernels around the longest copy. The summary says which
share of the copies' time another stream was busy too (0 if they run on the stream of the forward),
and which share of the whole time the copies took.
"""

from typing import Any

from benchmarks.arms import Arm, side_by_side
from benchmarks.capacity import BUDGET, SHAPE, engine_arguments
from benchmarks.command import parser, publish
from benchmarks.engine import Engine
from benchmarks.kernels import is_copy, traced
from benchmarks.results import Part, spread

REQUESTS, PROMPT, OUTPUT = 64, 1024, 512
BEFORE, STEPS = 100, 48
AROUND_US = 3000


def kernels(engine: Engine, seed: int) -> list[dict[str, Any]]:
    """Every kernel and copy of some decoding steps: stream, name, start, length."""
    assert engine.llm.reset_prefix_cache()
    step = engine.llm.llm_engine.step
    for i in range(REQUESTS):
        engine.send(engine.text(seed * 100 + i, PROMPT), OUTPUT, {})
    while engine.scheduler.waiting:
        step()
    for _ in range(BEFORE):
        step()
    found = traced(engine, STEPS)
    engine.drop_all()
    return [{**kernel, "name": kernel["name"][:48]} for kernel in found]


def overlap(found: list[dict[str, Any]]) -> float:
    """Share of the copies' time in which a kernel of another stream ran."""
    copies = [k for k in found if is_copy(k)]
    busy = sorted(
        (k["start_us"], k["start_us"] + k["length_us"])
        for k in found
        if k["stream"] != copies[0]["stream"]
    )
    covered = 0.0
    for copy in copies:
        begin, end = copy["start_us"], copy["start_us"] + copy["length_us"]
        for first, last in busy:
            if last > begin and first < end:
                covered += min(last, end) - max(first, begin)
                begin = max(begin, min(last, end))
    return covered / sum(copy["length_us"] for copy in copies)


def share_of_copies(found: list[dict[str, Any]]) -> float:
    """Of the time from the first kernel's start to the last one's end."""
    end = max(k["start_us"] + k["length_us"] for k in found)
    copied: float = sum(k["length_us"] for k in found if is_copy(k))
    return copied / (end - found[0]["start_us"])


def main() -> None:
    arguments = parser(__doc__, SHAPE).parse_args()
    engine = engine_arguments(9000, max_model_len=4096, max_num_seqs=64)
    arm = Arm("vtoken", BUDGET | {"theta_f": 0.05}, arguments.shape, engine)
    with side_by_side([arm]) as processes:
        runs = [processes["vtoken"].call(kernels, seed) for seed in range(arguments.rounds)]
    copies = [[k for k in run if is_copy(k)] for run in runs]
    longest = max(copies[-1], key=lambda kernel: kernel["length_us"])
    rows = [
        {**kernel, "start_us": kernel["start_us"] - longest["start_us"]}
        for kernel in runs[-1]
        if abs(kernel["start_us"] - longest["start_us"]) < AROUND_US
    ]
    summary = {
        "overlap_share": spread([overlap(run) for run in runs]),
        "copy_share": spread([share_of_copies(run) for run in runs]),
        "longest_copy_us": spread([max(k["length_us"] for k in found) for found in copies]),
    }
    config = {"shape": arguments.shape, "requests": REQUESTS, "prompt": PROMPT}
    publish("profile", Part(config, summary, rows))


if __name__ == "__main__":
    main()
