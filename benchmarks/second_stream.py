# SPDX-License-Identifier: Apache-2.0
"""What a CUDA graph costs once kernels have run on a second stream of the process.

    python -m benchmarks.second_stream

A graph of dependent kernels is replayed again and again; in between some kernels run elsewhere, and
have ended before the next replay. What they do to it stays for as long as the process, so every
kind of elsewhere gets a new one. ``same``, the control, launches them on the graph's own stream,
which is the default stream where nothing else is said.
"""

import ctypes
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.command import parser, publish, short
from benchmarks.results import Part, spread

NODES, WIDTH = 300, 4096
REPLAYS = 10
KINDS = (
    "same",
    "second",
    "second, high priority",
    "second, blocking",
    "second, transfers only",
    "second, in graphs",
    "second, ended after 16",
    "second, in a green context",
    "second, graph on a third",
    "default, graph on a second",
)
LAUNCHED = (0, 1, 64, 1024, 4096)


def look(kind: str) -> list[dict[str, Any]]:
    """Microseconds per node after so many launches in all. In a process of its own."""
    import torch

    graph, _reads = _forward()
    if ", graph on" in kind:
        torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    launch = _launcher(kind)
    rows, before = [], 0
    for count in LAUNCHED:
        for _ in range(count - before):
            launch()
        torch.cuda.synchronize()
        before = count
        rows.append({"kind": kind, "launched": count, "us_per_node": _us_per_node(graph)})
    return rows


def _forward() -> tuple[Any, Any]:
    """A graph of dependent kernels, and the tensors that it reads."""
    import torch

    weights = torch.randn(8, WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(8, WIDTH, dtype=torch.bfloat16, device="cuda")

    def run() -> None:
        y = x
        for i in range(NODES // 2):
            y = torch.mm(y, weights[i % 8]) * 0.01

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph, (weights, x)


def _launcher(kind: str) -> Callable[[], None]:
    """What launches one kernel, or another thing, elsewhere."""
    import torch

    host = torch.zeros(8, dtype=torch.bfloat16).pin_memory()
    other = torch.zeros(8, dtype=torch.bfloat16, device="cuda")
    other.add_(1)
    small = torch.cuda.CUDAGraph()
    if "in graphs" in kind:
        with torch.cuda.graph(small):
            other.add_(1)
    stream, launched = _elsewhere(kind), 0

    def launch() -> None:
        nonlocal stream, launched
        with torch.cuda.stream(stream):
            if "transfers" in kind:
                other.copy_(host, non_blocking=True)
            elif "in graphs" in kind:
                small.replay()
            else:
                other.add_(1)
        launched += 1
        if "ended" in kind and launched % 16 == 0:
            stream.synchronize()
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(runtime.cudaStreamDestroy(stream.cuda_stream))
            stream = _elsewhere(kind)

    return launch


def _elsewhere(kind: str) -> Any:
    import torch

    if kind == "same":
        return torch.cuda.current_stream()
    if kind.startswith("default"):
        return torch.cuda.default_stream()
    if "green" in kind:
        return _in_green_context()
    if "blocking" in kind or "ended" in kind:  # torch's own streams do not block and never end
        handle = ctypes.c_void_p()
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaStreamCreate(ctypes.addressof(handle)))
        return torch.cuda.ExternalStream(handle.value)  # type: ignore[no-untyped-call]
    return torch.cuda.Stream(priority=-1 if "high" in kind else 0)  # type: ignore[no-untyped-call]


def _in_green_context(multiprocessors: int = 8) -> Any:
    import torch
    from cuda.bindings import driver

    def done(result: tuple[Any, ...]) -> Any:
        if result[0] != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(str(result[0]))
        return result[1] if len(result) == 2 else result[1:]

    device = done(driver.cuDeviceGet(torch.cuda.current_device()))
    of_sms = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    every = done(driver.cuDeviceGetDevResource(device, of_sms))
    groups, _, _ = done(driver.cuDevSmResourceSplitByCount(1, every, 0, multiprocessors))
    description = done(driver.cuDevResourceGenerateDesc(groups, 1))
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    context = done(driver.cuGreenCtxCreate(description, device, flags))
    not_blocking = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    stream = done(driver.cuGreenCtxStreamCreate(context, not_blocking, 0))
    return torch.cuda.ExternalStream(int(stream))  # type: ignore[no-untyped-call]


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
