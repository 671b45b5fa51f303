# SPDX-License-Identifier: Apache-2.0
"""The score probe of a CPU replica: which of vLLM's layers it looks at, and how it sees queries.

CPU attention gives no weights. Its ``forward`` is a Python call on every step, so wrapping it on
the probed layers is enough to see their queries, after RoPE.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vtoken.copy_cpu import CpuCopyEngine, Int64s
from vtoken.errors import UnsupportedError
from vtoken.measure import Heads
from vtoken.options import ReplicaOptions
from vtoken.probe_cpu import CpuProbe
from vtoken.query_ring import QueryRing


def make_cpu_probe(
    layers: Mapping[str, Any], engine: CpuCopyEngine, options: ReplicaOptions, num_rows: int
) -> CpuProbe:
    """A probe over some of the model's attention layers, their ``forward`` wrapped.

    Args:
        layers: vLLM's attention layers by name, in the order of the engine's caches.
        num_rows: most requests that run at once.

    Raises:
        UnsupportedError: a layer computes attention in a way that the probe does not know.
    """
    names = list(layers)
    indices = spread(len(names), options.probe_layers)
    probed = [layers[names[i]] for i in indices]
    impls = [layer.impl for layer in probed]
    for name, impl in zip((names[i] for i in indices), impls, strict=True):
        if impl.sinks is not None:
            raise UnsupportedError(f"{name}: learnt attention sinks; set `probe`=false")
    first = probed[0]
    shape = len(indices), num_rows, options.probe_queries, first.num_heads, first.head_size
    ring = QueryRing(shape, first.dtype, torch.device("cpu"))

    def keys_of(layer: int, slots: Int64s) -> torch.Tensor:
        return engine.keys(indices[layer], slots)

    heads = [Heads(i.scale, i.logits_soft_cap, options.head_reduction) for i in impls]
    for number, impl in enumerate(impls):
        _record_queries(impl, ring, number)
    return CpuProbe(ring, keys_of, heads, num_rows)


def spread(num_layers: int, count: int) -> Sequence[int]:
    """``count`` of the layers, evenly spread, the last one among them; 0: all."""
    if count == 0 or count >= num_layers:
        return range(num_layers)
    chosen: list[int] = (np.arange(1, count + 1) * num_layers // count - 1).tolist()
    return chosen


def _record_queries(impl: Any, ring: QueryRing, number: int) -> None:
    stock = impl.forward

    def forward(layer: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        ring.record(number, query)
        return stock(layer, query, *args, **kwargs)

    impl.forward = forward
