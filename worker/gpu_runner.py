# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 model runner (its default on GPUs) with a shard in it.

The same three substitutions as on the CPU, made on the device: slots are looked up at
position - shift, attention length is length - shift, the row is ours. The runner's own ``seq_lens``
stay logical, since it decides by them whether a request still prefills; attention reads ours. Both
of our buffers are the ones that CUDA graphs are captured with.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch, prepare_pos_seq_lens
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vtoken.copy_cuda import CudaCopyEngine
from vtoken.probe_cuda import CudaProbe, CudaQueryRing, RingSize
from vtoken.shard import Shard, Splice
from worker.compat import check_layers, replica_options
from worker.invariants import checks_enabled
from worker.probed_layers import ProbedLayers
from worker.step_report import PendingReport, after_forward, attach, before_forward, orders_of


class VTokenGPUModelRunner(GPUModelRunner):
    """Executes orders around each forward and votes in the step's output."""

    shard: Shard | None = None
    # Counted so that a test can prove that the hooks ran at all.
    num_hook_calls = 0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        buffers = self.input_buffers
        self._indices = torch.zeros_like(buffers.positions)
        self._lengths = torch.zeros_like(buffers.seq_lens)
        self._shift = torch.zeros_like(self.req_states.num_computed_tokens.gpu)
        self._shift_np = np.zeros(self._shift.shape[0], np.int32)
        self._prepared: Any = None
        self._rows: dict[str, list[int]] = {}
        self._spliced: list[str] = []
        self._report: PendingReport | None = None
        self._wrap_attention()
        self._probed: ProbedLayers | None = None
        options = replica_options(self.vllm_config)
        if options.probes:  # now, so that the ring's memory is known when the cache is sized
            layers = get_layers_from_vllm_config(self.vllm_config, Attention)
            self._probed = ProbedLayers(layers, options)
            self._ring = self._make_ring(self._probed, options.probe_queries)

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, is_profiling, *args, **kwargs)
        check_layers(get_layers_from_vllm_config(self.vllm_config, Attention))
        if is_profiling:
            return  # these caches are thrown away
        block_size = self.block_tables.block_sizes[0]
        checks = checks_enabled(replica_options(self.vllm_config))
        engine = CudaCopyEngine(self.kv_caches)
        self.shard = Shard(0, block_size, engine, self._row_of, checks)
        if self._probed is not None:
            caches = [layer.kv_cache for layer in self._probed.layers]
            heads, index_of = self._probed.heads, self.req_states.req_id_to_index
            self.shard.probe = CudaProbe(self._ring, caches, heads, index_of.__getitem__)

    def _make_ring(self, probed: ProbedLayers, window: int) -> CudaQueryRing:
        size = RingSize(
            len(probed.indices),
            self.max_num_reqs,
            window,
            probed.num_heads,
            probed.head_size,
            self.max_num_tokens,
        )
        ring = CudaQueryRing(size, self.dtype, self.device)
        probed.watch(ring.record)
        return ring

    # -- a step --------------------------------------------------------------------------------

    def execute_model(
        self,
        scheduler_output: SchedulerOutput,
        intermediate_tensors: Any = None,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> Any:
        if dummy_run:
            return super().execute_model(
                scheduler_output, intermediate_tensors, dummy_run=True, **kwargs
            )
        shard, started = self._shard(), orders_of(scheduler_output).started
        self._spliced = []
        before_forward(shard, scheduler_output, self._splice)
        spliced = dict.fromkeys(self._spliced)
        self._spliced = [request_id for request_id in spliced if request_id not in started]
        for request_id in scheduler_output.finished_req_ids:
            self._rows.pop(request_id, None)
        output = super().execute_model(scheduler_output, intermediate_tensors, **kwargs)
        report = after_forward(shard, scheduler_output)
        if output is None:  # tokens follow in sample_tokens
            self._report = report
            return None
        return attach(output, report)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        report, self._report = self._report, None
        return attach(super().sample_tokens(*args, **kwargs), report)

    def _splice(self, splice: Splice) -> None:
        """vLLM's own row follows once it has removed and added requests."""
        request_id = splice.request_id
        self._rows[request_id] = splice.apply(self._rows[request_id])
        self._spliced.append(request_id)

    # -- rows and shifts -----------------------------------------------------------------------

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        super().add_requests(scheduler_output)
        indices = []
        for data in scheduler_output.scheduled_new_reqs:
            self._rows[data.req_id] = list(data.block_ids[0])
            indices.append(self.req_states.req_id_to_index[data.req_id])
        stale = [index for index in indices if self._shift_np[index]]
        self._set_shifts(stale, [0] * len(stale))

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        # Splices precede this step's own appends. A request preempted in this step has no index.
        index_of = self.req_states.req_id_to_index
        spliced = [request_id for request_id in self._spliced if request_id in index_of]
        for request_id in spliced:
            row = self._rows[request_id]
            self.block_tables.append_block_ids(index_of[request_id], (row,), overwrite=True)
        self._set_shifts(
            [index_of[request_id] for request_id in spliced],
            [self._shard().shift(request_id) for request_id in spliced],
        )
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids is not None:
                self._rows[request_id].extend(block_ids[0])
        super().update_requests(scheduler_output)

    def _set_shifts(self, indices: list[int], shifts: list[int]) -> None:
        if indices:
            self._shift_np[indices] = shifts
            where = async_tensor_h2d(indices, device=self.device, dtype=torch.int64)
            values = async_tensor_h2d(shifts, device=self.device, dtype=self._shift.dtype)
            self._shift.index_copy_(0, where, values)

    def _row_of(self, request_id: str) -> list[int] | None:
        row = self._rows.get(request_id)
        return list(row) if row is not None else None

    # -- substitutions -------------------------------------------------------------------------

    def prepare_attn(
        self, input_batch: InputBatch
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """vLLM's own preparation on resident lengths. No host sync, no loop over requests."""
        self.num_hook_calls += 1
        if self._probed is not None:
            self._ring.begin_step(
                input_batch.idx_mapping[: input_batch.num_reqs],
                input_batch.query_start_loc,
                input_batch.positions,
                input_batch.num_tokens_after_padding,
            )
        if not self._shift_np[input_batch.idx_mapping_np].any():
            # Indices are positions, and lengths are copied below.
            return super().prepare_attn(input_batch)
        self._prepared = input_batch
        computed = self.req_states.num_computed_tokens.gpu - self._shift
        prepare_pos_seq_lens(
            input_batch.idx_mapping,
            input_batch.query_start_loc,
            computed,
            self._indices,
            self._lengths,
        )
        return super().prepare_attn(replace(input_batch, positions=self._indices))

    def _wrap_attention(self) -> None:
        """Attention metadata is built from our lengths, for dummy and capture batches too."""
        stock = self.model_state.prepare_attn

        def prepare_attn(input_batch: InputBatch, *args: Any, **kwargs: Any) -> Any:
            return stock(self._physical(input_batch), *args, **kwargs)

        self.model_state.prepare_attn = prepare_attn

    def _physical(self, input_batch: InputBatch) -> InputBatch:
        lengths = self._lengths[: input_batch.seq_lens.shape[0]]
        bounds = input_batch.seq_lens_cpu_upper_bound
        if input_batch is self._prepared:
            shifts = self._shift_np[input_batch.idx_mapping_np]
            bounds = bounds.clone()
            bounds[: input_batch.num_reqs] -= torch.from_numpy(shifts)
        else:
            lengths.copy_(input_batch.seq_lens)
        self._prepared = None
        return replace(input_batch, seq_lens=lengths, seq_lens_cpu_upper_bound=bounds)

    def _shard(self) -> Shard:
        assert self.shard is not None, "initialize_kv_cache has not run"
        return self.shard
