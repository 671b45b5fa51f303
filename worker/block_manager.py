# SPDX-License-Identifier: Apache-2.0
"""vLLM's block accounting with a shift per request, and the reclaimer's view of it.

Selected by the KV cache group's role: plain registration conflicts with vLLM's own.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from vtoken.reclaimer import Reclaimer

if TYPE_CHECKING:
    from worker.admission import Admission

ROLE = "vtoken"


class VTokenBlockManager(FullAttentionManager):
    """Full attention whose rows may be shorter than their text.

    Attributes:
        shift: request id -> tokens that have left its row, for requests reclaimed from.
        reclaimer: told about every row that is given up; set by the scheduler.
        cause_of: request id -> why its row is given up now; set by the scheduler.
        admission: says how many blocks must be free to admit a request; set by the scheduler.
    """

    reclaimer: Reclaimer
    cause_of: Callable[[str], str]
    admission: "Admission"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shift: dict[str, int] = {}

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        *args: Any,
        apply_admission_cap: bool = False,
        **kwargs: Any,
    ) -> int:
        row = self.req_to_blocks.get(request_id)
        if row:  # running: the hot path
            resident = num_tokens - self.shift.get(request_id, 0)
            missing = -(-resident // self.block_size) - len(row)
            if missing <= 0:
                return 0
            if apply_admission_cap:
                return self.admission.to_continue(missing)
            return self._make_room(request_id, num_tokens, missing)
        if apply_admission_cap:
            required = self.admission.to_admit(request_id, new_computed_blocks)
            if required is not None:
                return required
        return super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            *args,
            apply_admission_cap=apply_admission_cap,
            **kwargs,
        )

    def _make_room(self, request_id: str, num_tokens: int, missing: int) -> int:
        """The blocks that it lacks, once holes are filled if there are too few: the last moment
        before a preemption."""
        free = self.block_pool.get_num_free_blocks()
        if missing <= free:
            return missing
        self.reclaimer.room.make(missing - free)
        resident = num_tokens - self.shift.get(request_id, 0)  # its own row may have shrunk
        return max(cdiv(resident, self.block_size) - len(self.req_to_blocks[request_id]), 0)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        shift = self.shift.get(request_id, 0)
        held = len(self.req_to_blocks[request_id])
        if num_tokens - shift <= held * self.block_size and not self._partial_hit_reqs:
            return []  # most steps: the tail block has room (vLLM would find the same)
        return super().allocate_new_blocks(
            request_id, num_tokens - shift, num_tokens_main_model - shift
        )

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        request_id = request.request_id
        # After its first reclaim a request's K/V is conditioned on evicted context: it must
        # publish no further hashes. The cached count stays, its presence is read elsewhere.
        if request_id in self.shift:
            return
        # Most steps fill no block; vLLM finds the same two frames deeper, twice a step.
        if num_tokens // self.block_size > self.num_cached_block.get(request_id, 0):
            super().cache_blocks(
                request, num_tokens, retention_interval, replay_boundaries=replay_boundaries
            )

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        # The one place where finish, preemption and reset pass: open plans are aborted here.
        self.reclaimer.drop(request_id, self.cause_of(request_id))
        self.shift.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)


class PoolPort:
    """The reclaimer's BlockPort over one VTokenBlockManager."""

    def __init__(
        self,
        manager: VTokenBlockManager,
        length_of: Callable[[str], int],
        growth_of: Callable[[], int],
        surplus_of: Callable[[str], int],
    ) -> None:
        self.manager = manager
        self.pool = manager.block_pool
        self.length = length_of
        self.growth = growth_of
        self.surplus = surplus_of

    def num_blocks(self) -> int:
        return self.pool.num_gpu_blocks - 1  # the null block is nobody's

    def num_free(self) -> int:
        return self.pool.get_num_free_blocks()

    def take(self, count: int) -> list[int]:
        return [block.block_id for block in self.pool.get_new_blocks(count)]

    def give_back(self, block_ids: Sequence[int]) -> None:
        self.pool.free_blocks([self.pool.blocks[i] for i in block_ids])

    def row_from(self, request_id: str, start: int) -> list[int]:
        return [block.block_id for block in self.manager.req_to_blocks[request_id][start:]]

    def private(self, request_id: str) -> npt.NDArray[np.bool_]:
        row = self.manager.req_to_blocks[request_id]
        return np.fromiter((block.ref_cnt == 1 for block in row), np.bool_, len(row))

    def forget_hashes(self, block_ids: Sequence[int]) -> None:
        self.pool.evict_blocks(set(block_ids))

    def replace_row(self, request_id: str, block_ids: Sequence[int], shift: int) -> None:
        blocks = self.pool.blocks
        self.manager.req_to_blocks[request_id] = [blocks[i] for i in block_ids]
        self.manager.shift[request_id] = shift
