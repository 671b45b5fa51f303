# SPDX-License-Identifier: Apache-2.0
"""The kernels of CUDA devices in Triton's interpreter, on a CPU, against float64 and numpy.

test_kernels.py runs this in a process of its own, as Triton must know when it is imported.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from harness.attention import explicit
from vtoken.copy_cuda import _copy_tokens, _layout_of
from vtoken.measure import Heads
from vtoken.probe_cuda import CudaProbe, CudaQueryRing, RingSize
from vtoken.signals import Measure, Probe

KV_HEADS, GROUP, SIZE, WINDOW, LAYERS, BLOCKS = 2, 4, 20, 5, 2, 12  # sizes that are padded
LENGTHS = {"a": 70, "b": 3, "c": 41}
ROWS = {"a": 2, "b": 0, "c": 1}
WANTED = {
    "a": tuple(Measure),
    "b": (Measure.MEAN_MASS, Measure.KEY_NORM),
    "c": (Measure.LAST_MASS, Measure.LOW_SHARE, Measure.KEY_SIMILARITY),
}


def targets() -> Iterator[tuple[Probe, np.ndarray, np.ndarray]]:
    """(order, slots, positions): of every text a third has left its row."""
    free = np.random.default_rng(1).permutation(BLOCKS).tolist()
    for name, length in LENGTHS.items():
        left = [p for p in range(length) if p % 3 or p >= length - 8]
        blocks = np.array([free.pop() for _ in range(-(-len(left) // 16))])
        slots = (blocks[:, None] * 16 + np.arange(16)).reshape(-1)[: len(left)]
        probe = Probe(name, 1, 0, length, min(WINDOW, length), WANTED[name])
        yield probe, slots.astype(np.int64), np.array(left, np.int32)


@pytest.mark.parametrize(
    "heads",
    [Heads(0.2), Heads(0.2, softcap=3.0), Heads(0.2, reduction="max")],
    ids=["plain", "softcap", "max"],
)
def test_the_probe_measures_what_float64_says(
    monkeypatch: pytest.MonkeyPatch, heads: Heads
) -> None:
    random = np.random.default_rng(0)
    ring_size = RingSize(LAYERS, len(ROWS), WINDOW, KV_HEADS * GROUP, SIZE, 1)
    ring = CudaQueryRing(ring_size, torch.float32, torch.device("cpu"))
    ring.queries.copy_(torch.from_numpy(random.normal(size=ring.queries.shape)))
    shape = BLOCKS, KV_HEADS, 16, 2 * SIZE
    caches = [torch.from_numpy(random.normal(size=shape)).float() for _ in range(LAYERS)]
    probe = CudaProbe(ring, caches, heads, ROWS.__getitem__)
    monkeypatch.setattr(probe, "_to_device", torch.from_numpy)  # nothing to pin
    found = list(targets())
    ends = np.cumsum([slots.size for _, slots, _ in found])
    measured = probe._launch(found, list(Measure), np.diff(ends, prepend=0).tolist()).numpy()
    for (order, slots, positions), end in zip(found, ends, strict=True):
        asked = np.arange(order.length - order.num_queries, order.length)
        places = ROWS[order.request_id] * WINDOW + asked % WINDOW
        total = dict.fromkeys(Measure, 0.0)
        for layer, cache in enumerate(caches):
            key = cache[slots // 16, :, slots % 16, :SIZE].double().numpy()
            query = ring.queries[layer, places].double().numpy()
            for measure, row in explicit(query, key, positions.tolist(), heads).items():
                total[measure] += np.array(row) / LAYERS
        for measure in order.measures:
            row = measured[list(Measure).index(measure), end - slots.size : end]
            assert np.allclose(row, total[measure], rtol=1e-4, atol=1e-7), (order, measure)


@pytest.mark.parametrize("programs", [20, 7, 1], ids=["one each", "some more", "all"])
def test_the_copy_moves_whole_tokens_and_nothing_else(programs: int) -> None:
    random = np.random.default_rng(0)
    shape = BLOCKS, 3, 16, 24  # no power of two among heads and words
    ids = random.integers(-(2**15), 2**15, size=(LAYERS, *shape)).astype(np.int16)
    caches = [torch.from_numpy(layer.copy()) for layer in ids]
    slots = random.permutation(BLOCKS * 16)[:40].reshape(2, 20)
    layout = _layout_of(caches[0].view(torch.bfloat16))
    addresses = torch.from_numpy(np.array([c.data_ptr() for c in caches], np.uint64))
    _copy_tokens[(programs, LAYERS)](
        addresses, torch.from_numpy(slots), 20, layout.block, layout.head, layout.slot,
        SIZE=16, HEADS=3, WORDS=layout.words, HEADS_UP=4, WORDS_UP=8,
    )  # fmt: skip
    expected = ids.copy()
    for source, destination in slots.T:
        (b, s), (c, t) = divmod(source, 16), divmod(destination, 16)
        expected[:, c, :, t] = ids[:, b, :, s]
    assert np.array_equal(np.stack([cache.numpy() for cache in caches]), expected)
    assert not np.array_equal(expected, ids)
