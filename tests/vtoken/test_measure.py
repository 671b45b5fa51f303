"""What a probe measures, against explicit softmax in float64, token by token."""

from typing import Any

import numpy as np
import pytest
import torch

from harness.attention import explicit
from vtoken.measure import Heads, measure_layer
from vtoken.query_ring import QueryRing
from vtoken.signals import Measure

TOLERANCE = 1e-5


def positions_of(kind: str) -> list[int]:
    """Resident tokens: all of them, or what is left after a reclaim, in the order of the row."""
    if kind == "all":
        return list(range(45))
    if kind == "few":
        return [25, 28, 29, 30, 31]  # the older queries of a window see nothing
    left = [p for p in range(90) if p % 3 or p >= 80]
    return left[20:] + left[:20] if kind == "shuffled" else left


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("num_queries", [1, 5, 32])
@pytest.mark.parametrize("kind", ["all", "reclaimed", "shuffled", "few"])
@pytest.mark.parametrize(
    "heads", [Heads(0.25), Heads(0.25, softcap=3.0), Heads(0.25, reduction="max")], ids=str
)
def test_measures_are_what_float64_says(
    group: int, num_queries: int, kind: str, heads: Heads
) -> None:
    positions, random = positions_of(kind), np.random.default_rng(group)
    query = random.normal(size=(num_queries, 2 * group, 16)).astype(np.float32)
    key = random.normal(size=(len(positions), 2, 16)).astype(np.float32)
    measured = measure_layer(
        torch.from_numpy(query), torch.from_numpy(key), torch.tensor(positions), heads, [*Measure]
    )
    expected = explicit(query.astype(np.float64), key.astype(np.float64), positions, heads)
    for measure, row in zip(Measure, measured.tolist(), strict=True):
        assert np.allclose(row, expected[measure], rtol=TOLERANCE, atol=1e-7), measure


def test_equal_attention_is_below_nobodys_average() -> None:
    """Nor is the only key that a query sees."""
    random = np.random.default_rng(0)
    query = torch.from_numpy(random.normal(size=(5, 6, 16)).astype(np.float32))
    for key in (torch.ones(33, 2, 16), torch.full((33, 2, 16), 0.37)):
        low = measure_layer(query, key, torch.arange(33), Heads(0.3), [Measure.LOW_SHARE])
        assert low.max() == 0
    alone = measure_layer(query[:1], key[:1], torch.arange(1), Heads(0.3), [Measure.LOW_SHARE])
    assert alone.tolist() == [[0]]


def test_a_query_does_not_see_what_comes_after_it() -> None:
    """A control for the mask: without it the masses of the first query would be other ones."""
    random = np.random.default_rng(0)
    query = torch.from_numpy(random.normal(size=(3, 1, 8)).astype(np.float32))
    key = torch.from_numpy(random.normal(size=(3, 1, 8)).astype(np.float32))
    masked = measure_layer(query, key, torch.tensor([0, 1, 2]), Heads(1.0), [Measure.MEAN_MASS])
    (row,) = torch.softmax(query[:, 0] @ key[:, 0].T, -1).mean(0, keepdim=True)
    assert not torch.allclose(masked[0], row)


def test_measures_come_in_the_order_asked_for() -> None:
    random = np.random.default_rng(0)
    query = torch.from_numpy(random.normal(size=(2, 2, 8)).astype(np.float32))
    key = torch.from_numpy(random.normal(size=(9, 2, 8)).astype(np.float32))
    where, heads = torch.arange(9), Heads(1.0)
    both = measure_layer(query, key, where, heads, [Measure.KEY_NORM, Measure.LAST_MASS])
    last = measure_layer(query, key, where, heads, [Measure.LAST_MASS])
    assert both.shape == (2, 9) and torch.equal(both[1], last[0])


@pytest.mark.parametrize("window", [1, 4, 16])
def test_the_ring_holds_the_latest_queries_of_each_request(window: int) -> None:
    random = np.random.default_rng(window)
    shape = (2, 3, window, 1, 1)
    ring = QueryRing(shape, torch.float32, torch.device("cpu"))
    texts: dict[int, list[float]] = {row: [] for row in range(3)}
    for _ in range(30):
        rows, positions, last, queries = [], [], [], []
        for row in random.permutation(3)[: random.integers(1, 4)].tolist():
            new = int(random.choice([1, 1, 1, 7, 20]))
            start = len(texts[row])
            texts[row] += (values := random.random(new).tolist())
            rows += [row] * new
            positions += range(start, start + new)
            last += [start + new - 1] * new
            queries += values
        step: Any = [torch.tensor(values) for values in (rows, positions, last)]
        ring.begin_step(*step)
        for layer in (0, 1):
            ring.record(layer, (layer + 1) * torch.tensor(queries)[:, None, None])
        for row, text in texts.items():
            count = min(window, len(text))
            for layer in (0, 1):
                found = ring.read(layer, row, len(text), count)[:, 0, 0]
                expected = (layer + 1) * torch.tensor(text[len(text) - count :])
                assert torch.equal(found, expected.float())


def test_a_request_without_a_row_leaves_no_trace() -> None:
    ring = QueryRing((1, 2, 4, 1, 1), torch.float32, torch.device("cpu"))
    ring.begin_step(torch.tensor([-1, -1, 1]), torch.tensor([0, 1, 0]), torch.tensor([1, 1, 0]))
    ring.record(0, torch.tensor([7.0, 7.0, 5.0])[:, None, None])
    assert ring._queries.flatten().tolist() == [0, 0, 0, 0, 5, 0, 0, 0]
