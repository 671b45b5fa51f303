"""The CPU copy engine: fill every element with its own id, run a plan, read back."""

import numpy as np
import pytest
import torch

from harness.tables import SIZE, make_plan, make_request
from vtoken.copy_cpu import CpuCopyEngine
from vtoken.plan import RelocationPlan

NUM_BLOCKS, HEADS, HEAD_SIZE, LAYERS = 8, 3, 5, 2
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


class Cache:
    """K/V of every layer, with K permuted inside a (block, head) as CPU attention does.

    Tests write and read it by (layer, half, block, head, slot, channel); only this class and the
    engine know where that lies.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.integer = INTEGERS[dtype]
        elements = SIZE * HEAD_SIZE
        order = torch.randperm(elements, generator=torch.Generator().manual_seed(3))
        self.index = {0: order.view(SIZE, HEAD_SIZE), 1: torch.arange(elements).view(SIZE, -1)}
        shape = (NUM_BLOCKS, HEADS, SIZE, 2 * HEAD_SIZE)
        self.layers = [torch.zeros(shape, dtype=dtype) for _ in range(LAYERS)]
        self.engine = CpuCopyEngine(self.layers, self.index[0], self.index[1])
        ids = np.arange(LAYERS * 2 * NUM_BLOCKS * HEADS * elements)
        self.write(ids.reshape(LAYERS, 2, NUM_BLOCKS, HEADS, SIZE, HEAD_SIZE))

    def _halves(self, layer: int) -> torch.Tensor:
        """[B, H, 2, S * D] integers, a view."""
        return self.layers[layer].view(self.integer).view(NUM_BLOCKS, HEADS, 2, -1)

    def write(self, values: np.ndarray) -> None:
        for layer in range(LAYERS):
            for half in (0, 1):
                wanted = torch.from_numpy(values[layer, half]).to(self.integer)
                self._halves(layer)[:, :, half, self.index[half]] = wanted

    def read(self) -> np.ndarray:
        return np.array(
            [
                [self._halves(layer)[:, :, half, self.index[half]].numpy() for half in (0, 1)]
                for layer in range(LAYERS)
            ]
        )


def example(destinations: list[int]) -> RelocationPlan:
    request = make_request(19, dead=[0, 5, 6, 7, 8, 9, 10], block_ids=[1, 3, 5, 7, 0])
    return make_plan(request, sources=[0, 1, 2], destinations=destinations)


def moved(before: np.ndarray, plan: RelocationPlan) -> np.ndarray:
    """What the cache must hold after the plan, element by element."""
    after = before.copy()
    for source, destination in zip(*plan.moves(), strict=True):
        (b, s), (c, t) = divmod(source, SIZE), divmod(destination, SIZE)
        after[:, :, c, :, t] = before[:, :, b, :, s]
    return after


@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_element_of_a_moved_token_arrives_and_nothing_else_changes(
    dtype: torch.dtype,
) -> None:
    cache, plan = Cache(dtype), example([6, 2])
    expected = moved(cache.read(), plan)
    cache.engine.start([plan])
    assert np.array_equal(cache.read(), expected)
    assert cache.engine.is_done(plan.plan_id)
    assert cache.engine.num_wrong_tokens(*plan.moves()) == 0


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("half", [0, 1])
def test_one_flipped_bit_in_a_destination_is_one_wrong_token(layer: int, half: int) -> None:
    cache, plan = Cache(torch.float32), example([6, 2])
    cache.engine.start([plan])
    values = cache.read()
    values[layer, half, 2, 1, 3, 4] ^= 1 << 20
    cache.write(values)
    assert cache.engine.num_wrong_tokens(*plan.moves()) == 1


def test_not_a_number_is_as_good_a_payload_as_any() -> None:
    cache, plan = Cache(torch.float32), example([6, 2])
    for layer in cache.layers:
        layer.fill_(float("nan"))
    cache.engine.start([plan])
    assert cache.engine.num_wrong_tokens(*plan.moves()) == 0


def test_a_plan_without_moves_touches_nothing() -> None:
    cache = Cache(torch.float32)
    plan = make_plan(make_request(15, dead=range(4, 12)), sources=[1, 2], destinations=[])
    before = cache.read()
    cache.engine.start([plan])
    assert np.array_equal(cache.read(), before)
    assert cache.engine.num_wrong_tokens(*plan.moves()) == 0


def test_copying_k_as_if_it_were_plain_gives_noise() -> None:
    """The control: V arrives, K does not, and the engine that knows the layout sees it."""
    cache, plan = Cache(torch.float32), example([6, 2])
    expected = moved(cache.read(), plan)
    CpuCopyEngine(cache.layers, cache.index[1], cache.index[1]).start([plan])
    assert not np.array_equal(cache.read()[:, 0], expected[:, 0])
    assert np.array_equal(cache.read()[:, 1], expected[:, 1])
    assert cache.engine.num_wrong_tokens(*plan.moves()) > 0
