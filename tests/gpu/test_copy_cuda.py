# SPDX-License-Identifier: Apache-2.0
"""The CUDA copy engine: fill every element with its own id, run plans, read back."""

from typing import Any

import numpy as np
import pytest
import torch

from harness.tables import SIZE, make_plan, make_request
from vtoken.copy_cuda import PROGRAMS_PER_SM
from vtoken.errors import UnsupportedError
from vtoken.plan import RelocationPlan

pytestmark = pytest.mark.gpu

NUM_BLOCKS, HEADS, WIDTH, LAYERS = 16, 3, 24, 3  # no power of two among heads and widths


def make_caches(heads_first: bool) -> list[torch.Tensor]:
    """bfloat16 ``[B, H, S, 2D]`` by shape, with one of two orders in memory; each element has
    bits of its own."""
    shape = (NUM_BLOCKS, HEADS, SIZE, WIDTH)
    caches = []
    for layer in range(LAYERS):
        ids = torch.arange(NUM_BLOCKS * HEADS * SIZE * WIDTH, dtype=torch.int32) + 7919 * layer
        values = ids.to(torch.int16).view(shape).view(torch.bfloat16)
        if not heads_first:
            values = values.transpose(1, 2).contiguous().transpose(1, 2)
        caches.append(values.cuda())
    return caches


def bits(caches: list[torch.Tensor]) -> np.ndarray:
    return np.stack([cache.contiguous().view(torch.int16).cpu().numpy() for cache in caches])


def example(plan_id: int, blocks: list[int], destinations: list[int]) -> RelocationPlan:
    request = make_request(19, dead=[0, 5, 6, 7, 8, 9, 10], block_ids=blocks)
    return make_plan(request, [0, 1, 2], destinations, plan_id)


def moved(before: np.ndarray, plans: list[RelocationPlan]) -> np.ndarray:
    after = before.copy()
    for plan in plans:
        for source, destination in zip(*plan.moves(), strict=True):
            (b, s), (c, t) = divmod(source, SIZE), divmod(destination, SIZE)
            after[:, c, :, t] = before[:, b, :, s]
    return after


def make_engine(caches: list[torch.Tensor]) -> Any:
    from vtoken.copy_cuda import CudaCopyEngine

    return CudaCopyEngine(caches)


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("per_sm", [PROGRAMS_PER_SM, 0], ids=["a token each", "one for all tokens"])
def test_every_element_of_a_moved_token_arrives_and_nothing_else_changes(
    monkeypatch: pytest.MonkeyPatch, heads_first: bool, per_sm: int
) -> None:
    monkeypatch.setattr("vtoken.copy_cuda.PROGRAMS_PER_SM", per_sm)
    caches = make_caches(heads_first)
    engine, before = make_engine(caches), bits(caches)
    plans = [example(1, [1, 3, 5, 7, 2], [6, 4]), example(2, [9, 8, 11, 10, 0], [15, 13])]
    engine.start(plans)
    engine.wait(1)
    engine.wait(2)
    assert np.array_equal(bits(caches), moved(before, plans))
    assert not np.array_equal(bits(caches), before)


def test_a_move_in_place_is_seen_by_what_the_main_stream_does_next() -> None:
    caches = make_caches(True)
    engine, before = make_engine(caches), bits(caches)
    sources, destinations = np.array([4, 6, 21]), np.array([33, 8, 60])
    engine.move(sources, destinations)
    after = before.copy()
    for source, destination in zip(sources, destinations, strict=True):
        (b, s), (c, t) = divmod(source, SIZE), divmod(destination, SIZE)
        after[:, c, :, t] = before[:, b, :, s]
    assert np.array_equal(bits(caches), after)
    assert engine.num_wrong_tokens(sources, destinations) == 0


def test_the_main_stream_goes_on_and_waits_only_where_told() -> None:
    caches = make_caches(True)
    engine = make_engine(caches)
    # Twice, as CUDA loads a kernel and pins memory at the first use, and the host waits for that.
    for plan_id in (1, 2):
        plan = example(plan_id, [1, 3, 5, 7, 2], [6, 4])
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)  # the forward, about half a second
        caches[0][1] += 1  # its last write is a source
        written = caches[0][1].clone()
        engine.start([plan])
        done_at_once = engine.is_done(plan_id)
        engine.wait(plan_id)
        after = caches[0].clone()  # on the main stream, behind the copy
        torch.cuda.synchronize()
    assert not done_at_once, "the copy waits for the forward, the host for nothing"
    sources, destinations = plan.moves()
    first = next(i for i, slot in enumerate(sources) if slot // SIZE == 1)
    there, slot = divmod(int(destinations[first]), SIZE)
    assert torch.equal(after[there, :, slot], written[:, int(sources[first]) % SIZE])


def test_a_garbled_token_is_counted() -> None:
    caches = make_caches(True)
    engine, plan = make_engine(caches), example(1, [1, 3, 5, 7, 2], [6, 4])
    engine.start([plan])
    torch.cuda.synchronize()
    assert engine.is_done(1) and engine.num_wrong_tokens(*plan.moves()) == 0
    caches[LAYERS - 1][6, HEADS - 1, 2, WIDTH - 1] += 1
    assert engine.num_wrong_tokens(*plan.moves()) == 1


@pytest.mark.parametrize(
    "last",
    [
        torch.zeros(NUM_BLOCKS, HEADS, SIZE, WIDTH + 4, dtype=torch.bfloat16),
        torch.zeros(NUM_BLOCKS, HEADS, WIDTH, SIZE, dtype=torch.bfloat16).transpose(2, 3),
        torch.zeros(NUM_BLOCKS, HEADS, SIZE, WIDTH, dtype=torch.int8),
    ],
)
def test_caches_that_are_not_alike_or_not_in_runs_are_refused(last: torch.Tensor) -> None:
    with pytest.raises(UnsupportedError):
        make_engine([*make_caches(True), last.cuda()])
