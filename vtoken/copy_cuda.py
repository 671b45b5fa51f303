# SPDX-License-Identifier: Apache-2.0
"""Copy engine for K/V tensors on a CUDA device: one kernel launch for all layers and all plans.

Copies run on the main stream, behind the forward that may have written their sources: kernels on
a second one slow down every CUDA graph of the process for good (docs/decisions/0011). The host
waits for nothing. Out of place, so no copy reads what another one writes.

Shape letters: B blocks, H kv heads, S tokens a block, D head size, N moved tokens, L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from vtoken.errors import UnsupportedError
from vtoken.plan import RelocationPlan

Int64s = npt.NDArray[np.int64]
# Programs of a launch on each multiprocessor: enough to keep the memory busy. More would wait in
# line, and what another stream starts, however small, behind them for the whole copy.
PROGRAMS_PER_SM = 8


@triton.jit(do_not_specialize=["num_moves"])
def _copy_tokens(  # type: ignore  # noqa: PLR0913, PLR0917
    layers,  # uint64 [L]: address of each layer's cache
    moves,  # int64 [2, N]: source slots, destination slots
    num_moves,
    stride_block,
    stride_head,
    stride_slot,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    HEADS_UP: tl.constexpr,
    WORDS_UP: tl.constexpr,
):
    """Copy tokens' K and V of all heads in one layer, as 64-bit words. Strides in words."""
    cache = tl.load(layers + tl.program_id(1)).to(tl.pointer_type(tl.int64))
    head = tl.arange(0, HEADS_UP)[:, None]
    word = tl.arange(0, WORDS_UP)[None, :]
    mask = (head < HEADS) & (word < WORDS)
    within = head * stride_head + word
    for move in range(tl.program_id(0), num_moves, tl.num_programs(0)):
        source = tl.load(moves + move)
        destination = tl.load(moves + num_moves + move)
        source_at = (source // SIZE) * stride_block + (source % SIZE) * stride_slot
        destination_at = (destination // SIZE) * stride_block + (destination % SIZE) * stride_slot
        values = tl.load(cache + source_at + within, mask=mask)
        tl.store(cache + destination_at + within, values, mask=mask)


@dataclass(frozen=True)
class _Layout:
    """Words of 64 bits between neighbours, the same in every layer."""

    block: int
    head: int
    slot: int
    words: int


class CudaCopyEngine:
    """Moves tokens between blocks of caches with plain slots.

    Args:
        kv_caches: one tensor a layer, ``[B, H, S, 2D]`` by shape with K and V of a token and head
            in one run of 2D elements; any strides between heads, slots and blocks.

    Attributes:
        stream: where copies run. Any stream is correct: they wait for the forward before them, and
            ``wait`` makes the main stream wait for them.

    Raises:
        UnsupportedError: the caches differ in layout, or a run is not made of 64-bit words.
    """

    def __init__(self, kv_caches: Sequence[torch.Tensor]) -> None:
        first = kv_caches[0]
        self._caches = list(kv_caches)
        self.num_blocks, self.heads, self.block_size, _ = first.shape
        self._layout = _layout_of(first)
        if any(
            cache.shape != first.shape or _layout_of(cache) != self._layout for cache in kv_caches
        ):
            raise UnsupportedError("the layers' KV caches differ in shape or strides")
        addresses = np.array([cache.data_ptr() for cache in kv_caches], np.uint64)
        self._addresses = torch.from_numpy(addresses).to(first.device)
        num_sms = torch.cuda.get_device_properties(first.device).multi_processor_count
        self._programs = max(1, PROGRAMS_PER_SM * num_sms // len(kv_caches))
        self.stream = torch.cuda.current_stream(first.device)  # vLLM runs its forwards on it
        self._done: dict[int, torch.cuda.Event] = {}
        # Compile now, not at the first reclaim: one slot of vLLM's null block onto itself.
        self._copy(np.zeros((2, 1), np.int64))

    def start(self, plans: Sequence[RelocationPlan]) -> None:
        """Issue the copies of all plans behind everything issued on the main stream so far."""
        moves = np.concatenate([np.stack(plan.moves()) for plan in plans], axis=1)
        ready, done = torch.cuda.Event(), torch.cuda.Event()
        ready.record()
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(ready)
            if moves.size:
                self._copy(moves)
            done.record()
        for plan in plans:
            self._done[plan.plan_id] = done

    def is_done(self, plan_id: int) -> bool:
        return self._done[plan_id].query()

    def wait(self, plan_id: int) -> None:
        """Make the main stream wait, on the device: the host never does."""
        done = self._done.pop(plan_id, None)
        if done is not None:
            torch.cuda.current_stream().wait_event(done)

    def move(self, sources: Int64s, destinations: Int64s) -> None:
        """Issue the copies on the main stream: what is issued later sees them."""
        if sources.size:
            self._copy(np.stack([sources, destinations]))

    def num_wrong_tokens(self, sources: Int64s, destinations: Int64s) -> int:
        """Compares bits and blocks the host; for checks only."""
        before, after = torch.from_numpy(sources), torch.from_numpy(destinations)
        wrong = torch.zeros(len(before), dtype=torch.bool)
        for cache in self._caches:
            same = self._gather(cache, before) == self._gather(cache, after)
            wrong |= ~same.flatten(1).all(1).cpu()
        return int(wrong.sum())

    def _gather(self, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """K and V of slots as bytes: ``[N, H, 2D * itemsize]``."""
        slots = slots.to(cache.device)
        found = cache[slots // self.block_size, :, slots % self.block_size]
        return found.contiguous().view(torch.uint8)

    def _copy(self, moves: np.ndarray) -> None:
        slots = torch.from_numpy(moves).pin_memory()
        self.launch(slots.to(self._addresses.device, non_blocking=True))

    def launch(self, slots: torch.Tensor) -> None:
        """Copy on the current stream. int64 ``[2, N]`` on the device: sources, destinations."""
        layout, num_moves = self._layout, slots.shape[1]
        _copy_tokens[(min(num_moves, self._programs), len(self._caches))](
            self._addresses,
            slots,
            num_moves,
            layout.block,
            layout.head,
            layout.slot,
            SIZE=self.block_size,
            HEADS=self.heads,
            WORDS=layout.words,
            HEADS_UP=triton.next_power_of_2(self.heads),
            WORDS_UP=triton.next_power_of_2(layout.words),
        )


def _layout_of(cache: torch.Tensor) -> _Layout:
    per_word, rest = divmod(8, cache.element_size())
    lengths = [*cache.stride()[:3], cache.shape[3]]
    aligned = cache.data_ptr() % 8 == 0 and all(length % per_word == 0 for length in lengths)
    if rest or cache.stride(3) != 1 or not aligned:
        raise UnsupportedError(f"a KV cache of shape {tuple(cache.shape)} is not in 64-bit runs")
    return _Layout(*(length // per_word for length in lengths))
