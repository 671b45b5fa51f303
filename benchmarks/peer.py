# SPDX-License-Identifier: Apache-2.0
"""The published shape of R-KV: 256 requests of 700 + 1,024 tokens where full KV runs 100 at once.

    python -m benchmarks.peer [--rounds 3]

10,800 blocks of a 7B shape, budget 512, policy `random`, against stock vLLM. R-KV reports 1.32
times the throughput of full KV there (arXiv 2505.24133).
"""

from benchmarks.arms import Arm, measured_by_turns, side_by_side
from benchmarks.capacity import BUDGET, engine_arguments, run_load
from benchmarks.command import parser, publish
from benchmarks.engine import Load
from benchmarks.results import Part, spread


def main() -> None:
    options = parser(__doc__, "mistral-7b-v0.3")
    arguments = options.parse_args()
    engine = engine_arguments(10800, max_model_len=2048, max_num_seqs=256)
    arms = [
        Arm("stock", None, arguments.shape, engine),
        Arm("vtoken", BUDGET, arguments.shape, engine),
    ]
    with side_by_side(arms) as processes:
        for arm in processes.values():
            arm.call(run_load, Load(4, 512, 32))
        rows = measured_by_turns(
            processes, arguments.rounds, run_load, lambda i: [Load(256, 700, 1024, seed=i)]
        )
    speed = {(row["round"], row["arm"]): row["tokens_per_s"] for row in rows}
    ratios = [speed[i, "vtoken"] / speed[i, "stock"] for i in range(arguments.rounds)]
    running = [row["max_running"] for row in rows if row["arm"] == "stock"]
    summary = {"peer_speedup_vs_stock": spread(ratios), "max_running_stock": spread(running)}
    config = {"shape": arguments.shape, "rounds": arguments.rounds}
    publish("peer", Part(config, summary, rows))


if __name__ == "__main__":
    main()
