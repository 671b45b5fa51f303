# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's attention layers a score probe looks at, and how it sees their queries.

Attention kernels give no weights. ``impl.forward`` runs inside an opaque operator, so compiled code
does not see it: wrapping it on the probed layers is enough to see the queries, after RoPE. Under
full CUDA graphs what the wrapper launches is captured.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vtoken.errors import UnsupportedError
from vtoken.measure import Heads
from vtoken.options import ReplicaOptions


class ProbedLayers:
    """Some of a model's attention layers, evenly spread.

    Args:
        layers: vLLM's attention layers by name, in the order of the model.

    Attributes:
        indices: which of them.

    Raises:
        UnsupportedError: a layer computes attention in a way that the probe does not know.
    """

    def __init__(self, layers: Mapping[str, Any], options: ReplicaOptions) -> None:
        names = list(layers)
        self.indices = spread(len(names), options.probe_layers)
        self.layers = [layers[names[i]] for i in self.indices]
        for i, layer in zip(self.indices, self.layers, strict=True):
            if layer.impl.sinks is not None:
                raise UnsupportedError(f"{names[i]}: learnt attention sinks: set `probe`=false")
        found = {
            Heads(layer.impl.scale, layer.impl.logits_soft_cap, options.head_reduction)
            for layer in self.layers
        }
        shapes = {(layer.num_heads, layer.head_size) for layer in self.layers}
        if len(found) != 1 or len(shapes) != 1:
            raise UnsupportedError("attention differs between layers: set `probe`=false")
        (self.heads,), ((self.num_heads, self.head_size),) = found, shapes

    def watch(self, record: Callable[[int, torch.Tensor], None]) -> None:
        """Have ``record(number, query [T, H, D])`` called inside every forward of each layer."""
        for number, layer in enumerate(self.layers):
            _watch(layer.impl, number, record)


def spread(num_layers: int, count: int) -> Sequence[int]:
    """``count`` of the layers, evenly spread, the last one among them; 0: all."""
    if count == 0 or count >= num_layers:
        return range(num_layers)
    chosen: list[int] = (np.arange(1, count + 1) * num_layers // count - 1).tolist()
    return chosen


def _watch(impl: Any, number: int, record: Callable[[int, torch.Tensor], None]) -> None:
    stock = impl.forward

    def forward(layer: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        record(number, query)
        return stock(layer, query, *args, **kwargs)

    impl.forward = forward
