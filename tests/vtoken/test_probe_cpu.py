# SPDX-License-Identifier: Apache-2.0
"""The probe for host memory, step by step, against attention by its definition in float64."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from harness.attention import explicit
from vtoken.measure import Heads
from vtoken.probe_cpu import CpuProbe
from vtoken.query_ring import QueryRing
from vtoken.signals import Measure, Probe

LAYERS, WINDOW, NUM_HEADS, KV_HEADS, SIZE = 2, 4, 4, 2, 8
NUM_SLOTS = 200
HEADS = Heads(0.35)


class Scene:
    """A probe and the texts that a model computes beside it.

    Attributes:
        queries: of each request, float32 ``[layers, H, D]`` a token.
        slots: of each request, where its keys lie.
    """

    def __init__(self, num_rows: int = 3, heads: Heads = HEADS) -> None:
        self.random, self.heads = np.random.default_rng(num_rows), heads
        self.keys = self._numbers(LAYERS, NUM_SLOTS, KV_HEADS, SIZE)
        shape = (LAYERS, num_rows, WINDOW, NUM_HEADS, SIZE)
        self.ring = QueryRing(shape, torch.float32, torch.device("cpu"))
        keys_of = [
            lambda slots, layer=layer: torch.from_numpy(layer)[torch.from_numpy(slots)]
            for layer in self.keys
        ]
        self.probe = CpuProbe(self.ring, keys_of, heads, num_rows)
        self.queries: dict[str, list[np.ndarray]] = {}
        self.slots: dict[str, list[int]] = {}
        self.free_slots = self.random.permutation(NUM_SLOTS).tolist()

    def start(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.probe.start(request_id)

    def step(self, **counts: int) -> None:
        """A forward that computes so many new tokens of each request, in this order."""
        positions, new = [], []
        for request_id, count in counts.items():
            text = self.queries.setdefault(request_id, [])
            positions += range(len(text), len(text) + count)
            new += (tokens := [self._numbers(LAYERS, NUM_HEADS, SIZE) for _ in range(count)])
            text += tokens
            slots = self.slots.setdefault(request_id, [])
            slots += [self.free_slots.pop() for _ in range(count)]
        self.probe.begin_step(
            list(counts), torch.tensor(list(counts.values())), torch.tensor(positions)
        )
        for layer in range(LAYERS):
            self.ring.record(layer, torch.from_numpy(np.stack(new)[:, layer]))

    def check(self, *request_ids: str, resident: Sequence[int] | None = None) -> None:
        """Measured together, each has what its own latest queries see in its own keys."""
        targets = []
        for request_id in request_ids:
            length = len(self.queries[request_id])
            probe = Probe(request_id, 1, 0, length, min(WINDOW, length), tuple(Measure))
            positions = np.array(range(length) if resident is None else resident, np.int32)
            targets.append((probe, np.array(self.slots[request_id])[positions], positions))
        for target, found in zip(targets, self.probe.measure(targets)(), strict=True):
            layers = [self.expected(layer, *target) for layer in range(LAYERS)]
            assert np.allclose(found, np.mean(layers, axis=0), rtol=1e-5, atol=1e-6)
            assert not np.allclose(*layers, atol=1e-2), "a control: layers differ"

    def expected(
        self, layer: int, probe: Probe, slots: np.ndarray, positions: np.ndarray
    ) -> list[list[float]]:
        latest = self.queries[probe.request_id][-probe.num_queries :]
        query = np.array([token[layer] for token in latest], np.float64)
        key = self.keys[layer][slots].astype(np.float64)
        return list(explicit(query, key, positions.tolist(), self.heads).values())

    def _numbers(self, *shape: int) -> np.ndarray:
        return self.random.normal(size=shape).astype(np.float32)


def test_requests_of_one_batch_each_keep_their_own_latest_queries() -> None:
    """Each has another last position, so another part of the batch falls into its window."""
    scene = Scene()
    scene.start("a", "b", "c")
    scene.step(a=2, b=30)
    scene.check("a", "b")
    scene.step(c=9, b=1, a=6)
    scene.check("b", "c", "a")


@pytest.mark.parametrize(
    "heads", [HEADS, Heads(0.35, softcap=2.0), Heads(0.35, reduction="max")], ids=str
)
def test_a_measurement_is_the_mean_over_the_probed_layers(heads: Heads) -> None:
    scene = Scene(heads=heads)
    scene.start("a")
    scene.step(a=7)
    scene.check("a")


def test_a_prompt_longer_than_the_window_is_followed_by_single_tokens() -> None:
    scene = Scene()
    scene.start("a")
    scene.step(a=11)
    scene.check("a")
    for _ in range(2 * WINDOW + 1):
        scene.step(a=1)
        scene.check("a")


def test_a_text_shorter_than_the_window_has_fewer_queries() -> None:
    scene = Scene()
    scene.start("a")
    for _ in range(WINDOW):
        scene.step(a=1)
        scene.check("a")


def test_only_the_keys_of_resident_tokens_are_looked_at() -> None:
    """In the order of the row, which is not that of the text."""
    scene = Scene()
    scene.start("a")
    scene.step(a=12)
    scene.check("a", resident=[8, 9, 10, 11, 0, 1, 5])


def test_a_request_that_was_never_started_touches_no_row() -> None:
    scene = Scene()
    scene.start("a", "b", "c")
    scene.step(a=5, b=5, c=5)
    scene.step(other=6, a=1)
    scene.check("a", "b", "c")


def test_stop_gives_the_row_to_the_next_request() -> None:
    scene = Scene(num_rows=1)
    scene.start("a")
    scene.step(a=9)
    scene.probe.stop("a")
    scene.start("b")
    scene.step(b=2)
    scene.check("b")
    scene.step(a=3, b=1)
    scene.check("b")


def test_starting_twice_takes_one_row_and_stopping_twice_gives_one_back() -> None:
    scene = Scene(num_rows=2)
    scene.start("a", "a", "b")
    scene.probe.stop("a")
    scene.probe.stop("a")
    scene.start("c")
    scene.step(b=6, c=5)
    scene.check("b", "c")
    with pytest.raises(IndexError):
        scene.start("d")
