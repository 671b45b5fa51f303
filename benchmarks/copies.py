# SPDX-License-Identifier: Apache-2.0
"""The copy engine on an idle device, on caches of an 8B model's shape.

Sources are half of the tokens of random blocks, at random. Bytes read and bytes written are both
counted, for us and for the plain copy.
"""

from typing import Any

import numpy as np
import torch

from benchmarks.results import spread
from vtoken.copy_cuda import CudaCopyEngine
from vtoken.plan import RelocationPlan

LAYERS, HEADS, SIZE, WIDTH, BLOCKS = 32, 8, 16, 256, 4096
TOKENS = (512, 4096, 16384)
REPEATS = 5
RUNS = 20


def make_plan(plan_id: int, num_tokens: int, rng: np.random.Generator) -> RelocationPlan:
    """Half of the tokens of random blocks into other blocks."""
    destinations = num_tokens // SIZE
    blocks = (rng.permutation(BLOCKS - 1)[: 3 * destinations] + 1).astype(np.int32)
    kept = np.zeros(2 * num_tokens, np.bool_)
    kept[rng.permutation(2 * num_tokens)[:num_tokens]] = True
    indices = np.arange(2 * destinations, dtype=np.int32)
    return RelocationPlan(
        plan_id=plan_id,
        request_id="r",
        incarnation=1,
        epoch=0,
        length=0,
        block_size=SIZE,
        source_indices=indices,
        source_blocks=blocks[: 2 * destinations],
        kept=kept,
        fillers=np.zeros_like(kept),
        destination_blocks=blocks[2 * destinations :],
        digest=0,
    )


def timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def seconds(work: Any, stream: torch.cuda.Stream) -> float:
    """Median device time of one call, by events on the stream that does the work."""
    times = []
    for i in range(RUNS + 3):
        begin, end = timing_event(), timing_event()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            begin.record()
            work()
            end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end) / 1e3)
    return float(np.median(times))


def measure_copies() -> tuple[list[dict[str, Any]], dict[str, dict[str, float]]]:
    shape = (BLOCKS, HEADS, SIZE, WIDTH)
    caches = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
    engine, rng, rows = CudaCopyEngine(caches), np.random.default_rng(0), []
    token_bytes = 2 * LAYERS * HEADS * WIDTH * 2  # read and written
    plain = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(plain)
    for repeat in range(REPEATS):
        bare = 2 * plain.numel() / seconds(lambda: target.copy_(plain), torch.cuda.current_stream())
        for tokens in TOKENS:
            slots = np.stack(make_plan(0, tokens, rng).moves())
            on_device = torch.from_numpy(slots).to("cuda")
            took = seconds(lambda moves=on_device: engine.launch(moves), engine.stream)
            rate = tokens * token_bytes / took
            row = {"repeat": repeat, "tokens": tokens, "plain_bytes_per_s": bare}
            rows.append(row | {"bytes_per_s": rate, "fraction": rate / bare, "seconds": took})
            print(rows[-1], flush=True)
    large = [
        min(r["fraction"] for r in rows if r["repeat"] == i and r["tokens"] >= 4096)
        for i in range(REPEATS)
    ]
    return rows, {"copy_bandwidth_fraction": spread(large)}
