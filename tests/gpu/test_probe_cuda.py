"""The CUDA probe against explicit softmax in float64, its ring fed step by step and by graphs."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from harness.attention import explicit
from vtoken.measure import Heads
from vtoken.probe_cuda import CudaProbe, CudaQueryRing, RingSize
from vtoken.signals import Measure, Probe

pytestmark = pytest.mark.gpu

LAYERS, ROWS, BLOCKS, KV_HEADS = 2, 6, 60, 2
MAX_TOKENS = 512
# Each text wants others, in one launch.
MEASURES = {
    "a": tuple(Measure),
    "b": (Measure.MEAN_MASS, Measure.KEY_NORM),
    "c": (Measure.LAST_MASS, Measure.LOW_SHARE, Measure.KEY_SIMILARITY),
}
# bf16 and fp16 queries and keys are what float64 gets too, so only the arithmetic differs.
TOLERANCE, SMALLEST = 1e-2, 1e-7


class Rig:
    """Texts of random queries over random keys, computed in steps of any shape."""

    def __init__(
        self, group: int, window: int, size: int, dtype: torch.dtype, heads: Heads
    ) -> None:
        self.random = np.random.default_rng(group + window)
        self.num_heads, self.size, self.heads = KV_HEADS * group, size, heads
        shape = BLOCKS, KV_HEADS, 16, 2 * size
        self.caches = [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(LAYERS)]
        ring_size = RingSize(LAYERS, ROWS, window, self.num_heads, size, MAX_TOKENS)
        self.ring = CudaQueryRing(ring_size, dtype, torch.device("cuda"))
        self.rows = {"a": 3, "b": 5, "c": 0}
        self.probe = CudaProbe(self.ring, self.caches, heads, self.rows.__getitem__)
        self.queries: dict[str, list[torch.Tensor]] = {name: [] for name in self.rows}

    def step(self, counts: dict[str, int], padded: int | None = None) -> torch.Tensor:
        """Compute some tokens of some texts; the queries, ``[L, T, H, D]``, padding included."""
        starts = np.cumsum([0, *counts.values()])
        firsts = [len(self.queries[name]) for name in counts]
        positions = [np.arange(f, f + n) for f, n in zip(firsts, counts.values(), strict=True)]
        padded = padded or int(starts[-1]) + 5
        query = torch.randn(
            LAYERS, padded, self.num_heads, self.size, device="cuda", dtype=self.ring.queries.dtype
        )
        places = np.zeros(padded, np.int64)
        places[: starts[-1]] = np.concatenate(positions)
        self.ring.begin_step(
            torch.tensor([self.rows[name] for name in counts], device="cuda"),
            torch.tensor(starts, device="cuda", dtype=torch.int32),
            torch.tensor(places, device="cuda"),
            padded,
        )
        for name, start, count in zip(counts, starts[:-1], counts.values(), strict=True):
            self.queries[name] += query[:, start : start + count].transpose(0, 1).unbind()
        return query

    def check(self, names: list[str]) -> None:
        """Measure texts of which every third token has left the row."""
        free, targets = self.random.permutation(BLOCKS).tolist(), []
        for name in names:
            length = len(self.queries[name])
            left = [p for p in range(length) if p % 3 or p >= length - 8]
            blocks = np.array([free.pop() for _ in range(-(-len(left) // 16))])
            slots = (blocks[:, None] * 16 + np.arange(16)).reshape(-1)[: len(left)]
            known = min(self.ring.window, length)
            probe = Probe(name, 1, 0, length, known, MEASURES[name])
            targets.append((probe, slots.astype(np.int64), np.array(left, np.int32)))
        for values, target in zip(self.probe.measure(targets)(), targets, strict=True):
            for measure, row in zip(target[0].measures, values, strict=True):
                expected = self._expected(*target)[measure]
                assert np.allclose(row, expected, rtol=TOLERANCE, atol=SMALLEST), measure

    def _expected(
        self, probe: Probe, slots: np.ndarray, positions: np.ndarray
    ) -> dict[Measure, np.ndarray]:
        total = {measure: np.zeros(positions.size) for measure in Measure}
        for layer, cache in enumerate(self.caches):
            key = cache[slots // 16, :, slots % 16, : self.size].double().cpu().numpy()
            latest = self.queries[probe.request_id][-probe.num_queries :]
            query = torch.stack([q[layer] for q in latest]).double().cpu().numpy()
            for measure, row in explicit(query, key, positions.tolist(), self.heads).items():
                total[measure] += np.array(row) / LAYERS
        return total


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    torch.manual_seed(0)
    yield request.param


PLAIN, CAPPED, LARGEST = Heads(0.2), Heads(0.2, softcap=3.0), Heads(0.2, reduction="max")


@pytest.mark.parametrize(
    ("group", "heads"), [(1, PLAIN), (4, PLAIN), (8, PLAIN), (4, CAPPED), (4, LARGEST)], ids=str
)
@pytest.mark.parametrize(("window", "size"), [(32, 128), (5, 64)])
def test_measures_are_what_float64_says(
    dtype: torch.dtype, group: int, window: int, size: int, heads: Heads
) -> None:
    rig = Rig(group, window, size, dtype, heads)
    for counts in ({"a": 90, "b": 3}, {"b": 1}, {"a": 1, "c": 40, "b": 1}, {"c": 1, "a": 1}):
        query = rig.step(counts)
        for layer in range(LAYERS):
            rig.ring.record(layer, query[layer])
        rig.check([name for name in rig.rows if rig.queries[name]])


def test_equal_attention_is_below_nobodys_average(dtype: torch.dtype) -> None:
    rig = Rig(4, 32, 128, dtype, PLAIN)
    for cache in rig.caches:
        cache.fill_(0.37)
    query = rig.step({"a": 90, "b": 1})
    for layer in range(LAYERS):
        rig.ring.record(layer, query[layer])
    rig.check(["a", "b"])


def test_a_captured_step_keeps_the_queries_of_its_own_replay(dtype: torch.dtype) -> None:
    rig = Rig(4, 8, 64, dtype, Heads(0.2))
    first = rig.step({"a": 20, "b": 9, "c": 3})
    for layer in range(LAYERS):
        rig.ring.record(layer, first[layer])
    static = torch.zeros(LAYERS, 4, rig.num_heads, 64, device="cuda", dtype=dtype)
    graph = torch.cuda.CUDAGraph()
    saved = rig.ring.places.clone()
    rig.ring.places.fill_(rig.ring.trash)  # as when an engine captures
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            rig.ring.record(layer, static[layer])
    rig.ring.places.copy_(saved)
    for counts in ({"a": 1, "b": 1, "c": 1}, {"c": 1, "a": 1}, {"b": 1}) * 4:
        static.copy_(rig.step(counts, padded=4))
        graph.replay()
    rig.check(["a", "b", "c"])
    rig.ring.queries[:, rig.rows["a"] * 8] += 1  # a control
    with pytest.raises(AssertionError):
        rig.check(["a", "b", "c"])
