# SPDX-License-Identifier: Apache-2.0
"""Which layers a probe looks at, and what it learns of them, on stand-ins for vLLM's layers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vtoken.errors import UnsupportedError
from vtoken.measure import Heads
from vtoken.options import ReplicaOptions
from worker.probed_layers import ProbedLayers, spread


class Impl:
    """A layer's attention as vLLM calls it: it returns all that it was given."""

    def __init__(self, **fields: Any) -> None:
        self.scale, self.logits_soft_cap, self.sinks = 0.125, 0, None
        vars(self).update(fields)

    def forward(self, layer: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return layer, query, args, kwargs


def layer_of(num_heads: int = 4, head_size: int = 64, **fields: Any) -> Any:
    return SimpleNamespace(num_heads=num_heads, head_size=head_size, impl=Impl(**fields))


def layers_of(count: int, **fields: Any) -> dict[str, Any]:
    return {f"layer{i}": layer_of(**fields) for i in range(count)}


def probed(layers: dict[str, Any], count: int = 4, **options: Any) -> ProbedLayers:
    return ProbedLayers(layers, ReplicaOptions(probe_layers=count, **options))


@pytest.mark.parametrize(
    ("num_layers", "count", "chosen"),
    [
        (32, 4, [7, 15, 23, 31]),
        (28, 4, [6, 13, 20, 27]),
        (30, 4, [6, 14, 21, 29]),
        (24, 1, [23]),
        (7, 3, [1, 3, 6]),
        (5, 2, [1, 4]),
        (4, 3, [0, 1, 3]),
        (3, 3, [0, 1, 2]),
        (3, 8, [0, 1, 2]),
        (3, 0, [0, 1, 2]),
        (1, 4, [0]),
    ],
)
def test_the_layers_chosen_are_evenly_spread_and_the_last_is_among_them(
    num_layers: int, count: int, chosen: list[int]
) -> None:
    assert list(spread(num_layers, count)) == chosen


@pytest.mark.parametrize("num_layers", range(1, 40))
def test_gaps_between_layers_differ_by_one_at_most(num_layers: int) -> None:
    for count in range(1, num_layers + 1):
        chosen = list(spread(num_layers, count))
        gaps = [b - a for a, b in zip([-1, *chosen], chosen, strict=False)]
        assert len(chosen) == count and chosen[-1] == num_layers - 1
        assert max(gaps) - min(gaps) <= 1 and min(gaps) >= 1


def test_layers_are_counted_in_the_order_of_the_model() -> None:
    """Not in that of their names, in which layer10 comes before layer2."""
    layers = layers_of(12)
    found = probed(layers, 2)
    assert list(found.indices) == [5, 11]
    assert found.layers == [layers["layer5"], layers["layer11"]]


@pytest.mark.parametrize("reduction", ["mean", "max"])
def test_scale_softcap_and_reduction_are_those_of_the_model_and_the_options(reduction: str) -> None:
    layers = layers_of(6, scale=0.3, logits_soft_cap=50.0, num_heads=12, head_size=80)
    found = probed(layers, head_reduction=reduction)
    assert found.heads == Heads(scale=0.3, softcap=50.0, reduction=reduction)
    assert (found.num_heads, found.head_size) == (12, 80)


def test_learnt_sinks_are_refused_by_the_name_of_the_layer() -> None:
    layers = layers_of(4)
    layers["layer3"] = layer_of(sinks=torch.zeros(4))
    with pytest.raises(UnsupportedError, match=r"layer3: learnt attention sinks.*`probe`=false"):
        probed(layers, 2)


@pytest.mark.parametrize(
    "other", [{"scale": 0.25}, {"logits_soft_cap": 30.0}, {"num_heads": 8}, {"head_size": 128}]
)
def test_layers_that_differ_are_refused(other: dict[str, Any]) -> None:
    layers = layers_of(4) | {"layer1": layer_of(**other)}
    with pytest.raises(UnsupportedError, match=r"differs between layers.*`probe`=false"):
        probed(layers, 2)


def test_layers_that_nobody_looks_at_may_differ() -> None:
    layers = layers_of(4) | {"layer0": layer_of(scale=0.25, sinks=torch.zeros(4), head_size=128)}
    assert probed(layers, 2).heads == Heads(0.125)


def test_a_watched_layer_tells_its_number_and_computes_what_it_did() -> None:
    layers, told = layers_of(4), []
    probed(layers, 2).watch(lambda number, query: told.append((number, query)))
    queries = [torch.full((3, 4, 64), float(i)) for i in range(4)]
    for layer, query in zip(layers.values(), queries, strict=True):
        answer = layer.impl.forward(layer, query, "key", "value", output="here")
        assert answer == (layer, query, ("key", "value"), {"output": "here"})
    assert [number for number, _ in told] == [0, 1]
    assert told[0][1] is queries[1] and told[1][1] is queries[3]
