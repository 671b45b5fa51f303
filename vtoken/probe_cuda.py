# SPDX-License-Identifier: Apache-2.0
"""Score probe for K/V tensors on a CUDA device: what ``vtoken/measure.py`` defines, as kernels.

Queries are kept by one scatter a probed layer inside the forward, with fixed shapes, so that CUDA
graphs can replay it. Measuring is one launch for all layers, heads and requests of a step.

Shape letters: T tokens of a step, N resident tokens of all measured requests, L probed layers,
H query heads, K KV heads, W window, D head size, M measures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton

from vtoken.measure import LOW, Heads, OverGroup, no_group
from vtoken.probe_kernels import attention_kernel, key_kernel, place_kernel
from vtoken.signals import Floats, Measure, Probe

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Target = tuple[Probe, Int64s, Int32s]

OF_ATTENTION = (Measure.MEAN_MASS, Measure.LAST_MASS, Measure.LOW_SHARE)
OF_KEYS = (Measure.KEY_NORM, Measure.KEY_SIMILARITY)
ALL = 2 ** len(Measure) - 1
# Resident tokens of one launch: what it writes, a number for each head and layer, stays small.
MAX_TOKENS = 32_768


def bits(measures: Sequence[Measure]) -> int:
    """A bit for each, in the order of ``Measure``: what the kernels write."""
    return sum(1 << i for i, measure in enumerate(Measure) if measure in measures)


@dataclass(frozen=True)
class RingSize:
    """W queries of H heads for each of the engine's request rows, in L layers; a step has
    ``max_tokens`` at most, padding included."""

    num_layers: int
    num_rows: int
    window: int
    num_heads: int
    head_size: int
    max_tokens: int


class CudaQueryRing:
    """Query at position p of the request in row r lies at ``r * W + p % W``; what nobody wants to
    keep goes to the place behind the last row."""

    def __init__(self, size: RingSize, dtype: torch.dtype, device: torch.device) -> None:
        self.window, self.trash = size.window, size.num_rows * size.window
        shape = size.num_layers, self.trash + 1, size.num_heads, size.head_size
        self.queries = torch.zeros(shape, dtype=dtype, device=device)
        self.places = torch.full((size.max_tokens,), self.trash, device=device)

    def begin_step(
        self, rows: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor, num_padded: int
    ) -> None:
        """Say whose tokens the next forward computes. No host sync.

        Args:
            rows: int32 ``[requests]``.
            starts: int32 ``[requests + 1]``, where each request's tokens begin.
            positions: int64 ``[T]``, text positions.
            num_padded: tokens that the forward will see.
        """
        place_kernel[(rows.shape[0] + 1,)](
            rows, starts, positions, self.places, num_padded, self.trash,
            rows.shape[0], WINDOW=self.window, BLOCK=256,
        )  # fmt: skip

    def record(self, layer: int, query_THD: torch.Tensor) -> None:
        """Keep what the step's queries leave in the window. Called inside the forward; captured."""
        tokens = query_THD.shape[0]
        self.queries[layer].index_copy_(0, self.places[:tokens], query_THD)


class CudaProbe:
    """Measures what the latest queries of every request see.

    Args:
        caches: of the probed layers, ``[B, K, S, 2D]``, all with the same strides.
        row_of: request -> its row in the engine's request state.
        over_group: adds the heads of the other tensor-parallel ranks.
    """

    def __init__(
        self,
        ring: CudaQueryRing,
        caches: Sequence[torch.Tensor],
        heads: Heads,
        row_of: Callable[[str], int],
        over_group: OverGroup = no_group,
    ) -> None:
        self.queries, self.window = ring.queries, ring.window
        self.caches, self.heads, self.row_of = caches, heads, row_of
        self.over_group = over_group
        self.device = ring.queries.device
        addresses = np.array([cache.data_ptr() for cache in caches], np.uint64)
        self._addresses = torch.from_numpy(addresses).to(self.device)
        self._compile()

    def _compile(self) -> None:
        """Now, not while requests wait: measure one slot of vLLM's null block."""
        about, nothing = torch.tensor([0, 1, 0, 1, 1, ALL]), torch.zeros(1, dtype=torch.int64)
        on_device = [values.to(self.device) for values in (about, nothing)]
        self._attention(on_device[0], on_device[1], on_device[1], 1)
        self._keys(on_device[0], on_device[1], 1)

    def start(self, request_id: str) -> None:
        """Rows are the engine's, and a request never reads what it has not written."""

    def stop(self, request_id: str) -> None:
        """Nothing to give back."""

    def measure(self, targets: Sequence[Target]) -> Callable[[], list[Floats]]:
        """Issue the measurements behind the forward; the result waits for them on the host."""
        groups: list[list[Target]] = [[]]
        tokens = 0
        for target in targets:
            tokens += target[1].size
            if tokens > MAX_TOKENS and groups[-1]:
                groups.append([])
                tokens = target[1].size
            groups[-1].append(target)
        pending = [self._measure(group) for group in groups]
        return lambda: [values for resolve in pending for values in resolve()]

    def _measure(self, targets: list[Target]) -> Callable[[], list[Floats]]:
        wanted = [m for m in Measure if any(m in probe.measures for probe, _, _ in targets)]
        sizes = [slots.size for _, slots, _ in targets]
        values = self._launch(targets, wanted, sizes)
        on_host = values.to("cpu", non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()

        def resolve() -> list[Floats]:
            done.synchronize()
            parts = np.split(on_host.numpy(), np.cumsum(sizes)[:-1], axis=1)
            return [
                part[[wanted.index(measure) for measure in probe.measures]]
                for part, (probe, _, _) in zip(parts, targets, strict=True)
            ]

        return resolve

    def _launch(
        self, targets: list[Target], wanted: list[Measure], sizes: list[int]
    ) -> torch.Tensor:
        """float32 ``[M, N]``, mean over the probed layers."""
        ends = np.cumsum(sizes)
        header = [
            (end - size, size, self.row_of(p.request_id), p.length, p.num_queries, bits(p.measures))
            for (p, _, _), end, size in zip(targets, ends, sizes, strict=True)
        ]
        slots = np.concatenate([slots for _, slots, _ in targets])
        positions = np.concatenate([positions for _, _, positions in targets])
        packed = np.concatenate([np.array(header, np.int64).reshape(-1), slots, positions])
        on_device = self._to_device(packed)
        split = [6 * len(targets), int(ends[-1]), int(ends[-1])]
        about, slots_N, positions_N = torch.split(on_device, split)
        rows: dict[Measure, torch.Tensor] = {}
        if set(wanted) & set(OF_ATTENTION):
            rows |= self._attention(about, slots_N, positions_N, len(targets))
        if set(wanted) & set(OF_KEYS):
            rows |= self._keys(about, slots_N, len(targets))
        over_all = [self.over_group(rows[m], self.heads.how(m)).mean(0) for m in wanted]
        return torch.stack(over_all)

    def _attention(
        self, about: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, count: int
    ) -> dict[Measure, torch.Tensor]:
        """``[L, N]`` each."""
        cache, heads = self.caches[0], self.heads
        num_layers, _, num_heads, size = self.queries.shape
        out = torch.empty(3, num_layers, num_heads, slots.shape[0], device=self.device)
        attention_kernel[(count, num_layers, num_heads)](
            self._addresses, self.queries, about, slots, positions, out,
            cache.stride(0), cache.stride(1), cache.stride(2),
            self.queries.stride(0), self.queries.stride(1), self.queries.stride(2),
            out.stride(0), out.stride(1), out.stride(2),
            heads.scale, heads.softcap,
            SIZE=cache.shape[2], GROUP=num_heads // cache.shape[1], WINDOW=self.window,
            WINDOW_UP=max(16, triton.next_power_of_2(self.window)),
            D=size, D_UP=max(16, triton.next_power_of_2(size)), BLOCK=64,
            SOFTCAP=bool(heads.softcap), LOW=LOW,
        )  # fmt: skip
        over = torch.amax if heads.reduction == "max" else torch.mean
        rows = over(out[0], 1), over(out[1], 1), out[2].mean(1)
        return dict(zip(OF_ATTENTION, rows, strict=True))

    def _keys(
        self, about: torch.Tensor, slots: torch.Tensor, count: int
    ) -> dict[Measure, torch.Tensor]:
        """``[L, N]`` each."""
        cache = self.caches[0]
        num_layers, num_kv_heads = self.queries.shape[0], cache.shape[1]
        out = torch.empty(2, num_layers, num_kv_heads, slots.shape[0], device=self.device)
        key_kernel[(count, num_layers, num_kv_heads)](
            self._addresses, self.queries, about, slots, out,
            cache.stride(0), cache.stride(1), cache.stride(2),
            out.stride(0), out.stride(1), out.stride(2),
            SIZE=cache.shape[2], D=self.queries.shape[3],
            D_UP=triton.next_power_of_2(self.queries.shape[3]), BLOCK=64,
        )  # fmt: skip
        return dict(zip(OF_KEYS, out.mean(2), strict=True))

    def _to_device(self, values: Int64s) -> torch.Tensor:
        return torch.from_numpy(values).pin_memory().to(self.device, non_blocking=True)
