# SPDX-License-Identifier: Apache-2.0
"""What a CUDA graph costs once kernels have run on a second stream of the process.

    python -m benchmarks.second_stream

A graph of dependent kernels is replayed again and again; in between some kernels run elsewhere, and
have ended before the next replay. What they do to it stays for as long as the process, so every
kind of elsewhere gets a new one. ``same``, the control, launches them on the graph's own stream,
which is the default stream except for ``graph on a third``.
"""

import ctypes
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.command import parser, publish, short
from benchmarks.results import Part, spread

NODES, WIDTH = 300, 4096
REPLAYS = 20
KINDS = (
    "same",
    "second",
    "second, high priority",
    "second, blocking",
    "second, transfers only",
    "second, graph on a third",
)
LAUNCHED = (0, 1, 16, 64, 256, 1024, 4096)


def look(kind: str) -> list[dict[str, Any]]:
    """Microseconds per node after so many launches in all. In a process of its own."""
    import torch

    weights = torch.randn(8, WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(8, WIDTH, dtype=torch.bfloat16, device="cuda")
    host = torch.zeros(8, dtype=torch.bfloat16).pin_memory()
    other = torch.zeros(8, dtype=torch.bfloat16, device="cuda")

    def forward() -> None:
        y = x
        for i in range(NODES // 2):
            y = torch.mm(y, weights[i % 8]) * 0.01

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    if "third" in kind:
        torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    elsewhere = torch.cuda.current_stream() if kind == "same" else _second(kind)
    rows, before = [], 0
    for count in LAUNCHED:
        with torch.cuda.stream(elsewhere):
            for _ in range(count - before):
                if "transfers" in kind:
                    other.copy_(host, non_blocking=True)
                else:
                    other.add_(1)
        torch.cuda.synchronize()
        before = count
        rows.append({"kind": kind, "launched": count, "us_per_node": _us_per_node(graph)})
    return rows


def _second(kind: str) -> Any:
    import torch

    if "blocking" in kind:  # towards the default stream; torch's own streams are not
        handle = ctypes.c_void_p()
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaStreamCreate(ctypes.addressof(handle)))
        return torch.cuda.ExternalStream(handle.value)  # type: ignore[no-untyped-call]
    return torch.cuda.Stream(priority=-1 if "high" in kind else 0)  # type: ignore[no-untyped-call]


def _us_per_node(graph: Any) -> float:
    import torch

    from benchmarks.copies import seconds

    def replay() -> None:
        for _ in range(REPLAYS):
            graph.replay()

    return seconds(replay, torch.cuda.current_stream()) / REPLAYS / NODES * 1e6


def alone(kind: str) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as process:
        return process.submit(look, kind).result()


def main() -> None:
    arguments = parser(__doc__, "none").parse_args()
    rows = []
    for number in range(arguments.rounds):
        for kind in KINDS:
            rows += [{"round": number, **row} for row in alone(kind)]
            print(short(rows[-len(LAUNCHED)]), short(rows[-1]), flush=True)
    took = {(row["round"], row["kind"], row["launched"]): row["us_per_node"] for row in rows}
    summary = {
        f"node_ratio {kind}": spread(
            [took[i, kind, LAUNCHED[-1]] / took[i, kind, 0] for i in range(arguments.rounds)]
        )
        for kind in KINDS
    }
    publish("second_stream", Part({"nodes": NODES, "width": WIDTH}, summary, rows))


if __name__ == "__main__":
    main()
