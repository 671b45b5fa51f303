# SPDX-License-Identifier: Apache-2.0
"""Kernels that the device ran, by torch's profiler: of what kind, and when none ran at all."""

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# (kind, parts of a name in lower case), the first that fits.
KINDS = (
    ("copy of plans", ("_copy_tokens",)),
    ("attention", ("flash::flashattnfwd", "flash::enable", "prepare_varlen")),
    ("matrix products", ("nvjet", "gemm", "cutlass", "splitk")),
    ("transfers", ("memcpy", "memset")),
)


def traced(engine: Any, steps: int) -> list[dict[str, Any]]:
    """Every kernel and transfer of some steps, by start: stream, name, start and length in µs."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:  # the host's would slow it down
        for _ in range(steps):
            engine.llm.llm_engine.step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = [
        {
            "stream": event["args"]["stream"],
            "name": event["name"],
            "start_us": event["ts"],
            "length_us": event["dur"],
        }
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return sorted(found, key=lambda kernel: kernel["start_us"])


def is_copy(kernel: dict[str, Any]) -> bool:
    return "_copy_tokens" in kernel["name"]


def kind(name: str) -> str:
    lower = name.lower()
    return next((k for k, parts in KINDS if any(part in lower for part in parts)), "small kernels")


def busy_us(kernels: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Microseconds by kind; kernels that overlap count in full."""
    total: Counter[str] = Counter()
    for kernel in kernels:
        total[kind(kernel["name"])] += kernel["length_us"]
    return dict(total)


def idle_us(kernels: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Microseconds in which nothing ran, by the kinds before and after: ``"a, b"``."""
    total: Counter[str] = Counter()
    last, end = kernels[0], kernels[0]["start_us"]
    for kernel in kernels:
        if kernel["start_us"] > end:
            total[f"{kind(last['name'])}, {kind(kernel['name'])}"] += kernel["start_us"] - end
        if kernel["start_us"] + kernel["length_us"] > end:
            last, end = kernel, kernel["start_us"] + kernel["length_us"]
    return dict(total)
