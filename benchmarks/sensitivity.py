# SPDX-License-Identifier: Apache-2.0
"""What block size, share of tokens kept and theta_f change (the paper stops at theta_f 0.20-0.35).

    python -m benchmarks.sensitivity [--rounds 3]

64 requests of 512 + 1,024 tokens, memory ample, `reclaim: eager`. One knob moves, the others stay
at blocks of 16 tokens, half of the tokens kept, theta_f 0.25; one point is `adaptive`. Per point:
throughput, blocks held in the end per block that the live tokens need, tokens moved per block given
back.
"""

from typing import Any

from benchmarks.arms import Arm, by_turns, side_by_side
from benchmarks.capacity import SHAPE, engine_arguments
from benchmarks.command import parser, publish, short
from benchmarks.engine import Engine, Load, Watch
from benchmarks.results import Part, spread

BLOCK_SIZES = (16, 32, 48)
ADAPTIVE = -1.0  # in the place of theta_f, which that does not use
POINTS = [
    *[{"keep_ratio": ratio, "theta_f": 0.25} for ratio in (0.3, 0.5, 0.7)],
    *[{"keep_ratio": 0.5, "theta_f": theta} for theta in (0.05, 0.15, 0.35, 0.5, 0.7, 0.9)],
    {"keep_ratio": 0.5, "theta_f": ADAPTIVE},
]
LOAD = Load(64, 512, 1024, options={"policy": "random", "evict_after_tokens": 0})


def point(engine: Engine, knobs: dict[str, float], seed: int) -> dict[str, Any]:
    """One run with these knobs, on an engine whose replica options are changed for it."""
    reclaimer = engine.scheduler.reclaimer
    theta, adaptive = knobs["theta_f"], {"reclaim": "adaptive"}
    update = adaptive if theta == ADAPTIVE else {"reclaim": "eager", "theta_f": theta}
    changed = reclaimer.options.model_copy(update=update)
    reclaimer.options = reclaimer.planner.options = changed
    seen: dict[str, Any] = {}

    def look(watch: Watch) -> bool:
        if watch.steps % 64 == 0 and (rows := engine.rows()):
            held, ideal = (sum(row[key] for row in rows) for key in ("blocks", "ideal"))
            seen["blocks_over_ideal"] = held / ideal
        return False

    options = {**LOAD.options, "keep_ratio": knobs["keep_ratio"]}
    load = Load(LOAD.num_requests, LOAD.prompt_tokens, LOAD.output_tokens, 0, options, seed)
    row = engine.run(load, stop=look)
    moved = row["tokens_moved"] / max(1, row["blocks_given_back"])
    return {**knobs, **row, **seen, "moved_per_block": moved}


def main() -> None:
    options = parser(__doc__, SHAPE)
    options.add_argument("--block-size", type=int, nargs="*", default=list(BLOCK_SIZES))
    arguments = options.parse_args()
    arms = []
    for size in arguments.block_size:
        engine = engine_arguments(9000 * 16 // size, max_model_len=2048, max_num_seqs=64)
        engine["block_size"] = size
        arms.append(Arm(f"blocks of {size}", {"reclaim": "eager"}, arguments.shape, engine))
    rows = []
    with side_by_side(arms) as processes:
        for number, name in by_turns(list(processes), arguments.rounds):
            points = POINTS if name == "blocks of 16" else [POINTS[1]]
            for knobs in points:
                row = processes[name].call(point, knobs, number)
                rows.append({"round": number, "arm": name, **row})
                print(short(rows[-1]), flush=True)
    summary = {}
    for arm, keep, theta in sorted({(r["arm"], r["keep_ratio"], r["theta_f"]) for r in rows}):
        here = [r for r in rows if (r["arm"], r["keep_ratio"], r["theta_f"]) == (arm, keep, theta)]
        how = "adaptive" if theta == ADAPTIVE else f"theta_{theta}"
        label = f"{arm.replace(' ', '_')}_keep_{keep}_{how}"
        for key in ("tokens_per_s", "blocks_over_ideal", "moved_per_block"):
            summary[f"{key}_{label}"] = spread([row[key] for row in here])
    config = {"shape": arguments.shape, "rounds": arguments.rounds}
    publish("sensitivity", Part(config, summary, rows))


if __name__ == "__main__":
    main()
