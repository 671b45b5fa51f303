# SPDX-License-Identifier: Apache-2.0
"""Copy engine for K/V tensors in host memory: copies are done when ``start`` returns.

Shape letters: B blocks, H kv heads, S tokens a block, D head size, N moved tokens.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from vtoken.plan import RelocationPlan

Int64s = npt.NDArray[np.int64]


class CpuCopyEngine:
    """Moves tokens between blocks of the CPU attention layout.

    Args:
        kv_caches: one tensor a layer, ``[B, H, S, 2D]``, any dtype; per (block, head) the first
            S * D elements hold K and the last S * D hold V.
        k_index_SD: int64 ``[S, D]``: where element (slot, channel) of K lies among those S * D.
        v_index_SD: the same for V.
    """

    def __init__(
        self,
        kv_caches: Sequence[torch.Tensor],
        k_index_SD: torch.Tensor,
        v_index_SD: torch.Tensor,
    ) -> None:
        self.block_size, self.head_size = k_index_SD.shape
        half = self.block_size * self.head_size
        self._index_S2D = torch.cat([k_index_SD, v_index_SD + half], dim=1)
        self._flat = [kv.view(kv.shape[0], kv.shape[1], 2 * half) for kv in kv_caches]

    @property
    def num_blocks(self) -> int:
        return self._flat[0].shape[0]

    def start(self, plans: Sequence[RelocationPlan]) -> None:
        """Copy now: the caller has just run the forward of this step to its end."""
        for plan in plans:
            self.move(*plan.moves())

    def move(self, sources: Int64s, destinations: Int64s) -> None:
        """Copy slots to slots now. int64 ``[N]`` each; the two sets are disjoint."""
        if sources.size:
            for flat in self._flat:
                flat[self._where(flat, destinations)] = self._gather(flat, sources)

    def is_done(self, plan_id: int) -> bool:
        return True

    def wait(self, plan_id: int) -> None:
        """Nothing to wait for: ``start`` has copied."""

    def num_wrong_tokens(self, sources: Int64s, destinations: Int64s) -> int:
        wrong = np.zeros(sources.size, np.bool_)
        for flat in self._flat:
            # Compare bits: NaN is as good a payload as any.
            before = self._gather(flat, sources).view(torch.uint8)
            after = self._gather(flat, destinations).view(torch.uint8)
            wrong |= (before != after).flatten(1).any(1).numpy()
        return int(wrong.sum())

    def keys(self, layer: int, slots: Int64s) -> torch.Tensor:
        """K of slots in one layer: ``[N, H, D]``."""
        return self._gather(self._flat[layer], slots)[..., : self.head_size]

    def _gather(self, flat: torch.Tensor, slots: Int64s) -> torch.Tensor:
        """K and V of slots: ``[N, H, 2D]``."""
        return flat[self._where(flat, slots)]

    def _where(
        self, flat: torch.Tensor, slots: Int64s
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        block, offset = np.divmod(slots, self.block_size)
        heads = torch.arange(flat.shape[1])
        elements = self._index_S2D[torch.from_numpy(offset)]
        return torch.from_numpy(block)[:, None, None], heads[None, :, None], elements[:, None, :]
