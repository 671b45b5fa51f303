# SPDX-License-Identifier: Apache-2.0
"""Ranks of a tensor-parallel group hold other heads; together they measure what one would."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from vtoken.measure import Heads, How, OverGroup, no_group
from vtoken.probe_cpu import CpuProbe
from vtoken.query_ring import QueryRing
from vtoken.signals import Floats, Measure, Probe

LAYERS, WINDOW, HEADS, KV_HEADS, SIZE, TOKENS = 2, 5, 4, 2, 16, 12
QUERY = torch.randn(LAYERS, TOKENS, HEADS, SIZE, generator=torch.Generator().manual_seed(0))
KEY = torch.randn(LAYERS, TOKENS, KV_HEADS, SIZE, generator=torch.Generator().manual_seed(1))


def measured(heads: Heads, ranks: int, rank: int, over_group: OverGroup = no_group) -> Floats:
    """Of one text, by a rank that holds its share of the heads."""
    mine = slice(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
    keys = slice(rank * KV_HEADS // ranks, (rank + 1) * KV_HEADS // ranks)
    shape = LAYERS, 1, WINDOW, HEADS // ranks, SIZE
    ring = QueryRing(shape, torch.float32, torch.device("cpu"))
    keys_of = [lambda slots, layer=layer: KEY[layer, slots][:, keys] for layer in range(LAYERS)]
    probe = CpuProbe(ring, keys_of, heads, 1, over_group)
    probe.start("r")
    probe.begin_step(["r"], torch.tensor([TOKENS]), torch.arange(TOKENS))
    for layer in range(LAYERS):
        ring.record(layer, QUERY[layer][:, mine])
    order = Probe("r", 1, 0, TOKENS, WINDOW, tuple(Measure))
    slots = np.arange(TOKENS)
    (values,) = probe.measure([(order, slots, slots.astype(np.int32))])()
    return values


def with_the_other(found: list[torch.Tensor]) -> Callable[[torch.Tensor, How], torch.Tensor]:
    """An all-reduce of two, the other rank having measured before."""

    def over_group(values: torch.Tensor, how: How) -> torch.Tensor:
        both = torch.stack([values, found.pop(0)])
        return both.amax(0) if how == "max" else both.mean(0)

    return over_group


@pytest.mark.parametrize("reduction", ["mean", "max"])
def test_two_ranks_measure_what_one_does(reduction: How) -> None:
    heads, found = Heads(0.25, reduction=reduction), []

    def note(values: torch.Tensor, how: How) -> torch.Tensor:
        found.append(values)
        return values

    alone = measured(heads, 2, 1, note)
    together = measured(heads, 2, 0, with_the_other(found))
    expected = measured(heads, 1, 0)
    assert np.allclose(together, expected, rtol=1e-5, atol=1e-7)
    assert not np.allclose(alone, expected, rtol=1e-2)  # a control
