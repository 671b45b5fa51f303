# SPDX-License-Identifier: Apache-2.0
"""The CPU model runner (vLLM's V1 runner) with a shard in it.

Three substitutions make stock kernels see a repacked row (design: one integer carries it):
slots are looked up at position - shift, attention length is length - shift, the row is ours.
Positions, sampling and everything else keep logical lengths.
"""

from functools import partial
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vtoken.copy_cpu import CpuCopyEngine
from vtoken.errors import UnsupportedError
from vtoken.probe_cpu import CpuProbe
from vtoken.query_ring import QueryRing
from vtoken.shard import Shard, Splice
from worker.compat import check_layers, replica_options
from worker.cpu_layout import learn_layout
from worker.invariants import checks_enabled
from worker.probed_layers import ProbedLayers
from worker.step_report import PendingReport, after_forward, attach, before_forward


class VTokenCPUModelRunner(CPUModelRunner):
    """Executes orders around each forward and votes in the step's output."""

    shard: Shard | None = None
    # Counted so that a test can prove that the hooks ran at all.
    num_hook_calls = 0

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        if self.shard is not None:
            raise UnsupportedError("the KV cache is made anew: start the engine again instead")
        super().initialize_kv_cache(*args, **kwargs)
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        check_layers(layers)
        (group,) = self.kv_cache_config.kv_cache_groups
        spec = group.kv_cache_spec
        caches = _distinct(self.kv_caches)
        layout = learn_layout(spec.dtype, spec.block_size, spec.head_size, spec.num_kv_heads)
        options = replica_options(self.vllm_config)
        engine = CpuCopyEngine(caches, *layout)
        self.shard = Shard(0, spec.block_size, engine, self._row_of, checks_enabled(options))
        self._probe: CpuProbe | None = None
        if options.probes:
            self.shard.probe = self._probe = self._make_probe(ProbedLayers(layers, options), engine)
        self._report: PendingReport | None = None
        self._wrap_slot_mapping()

    def _make_probe(self, probed: ProbedLayers, engine: CpuCopyEngine) -> CpuProbe:
        num_rows = self.scheduler_config.max_num_seqs
        window = replica_options(self.vllm_config).probe_queries
        shape = len(probed.indices), num_rows, window, probed.num_heads, probed.head_size
        ring = QueryRing(shape, self.dtype, torch.device("cpu"))
        probed.watch(ring.record)
        pointers = [cache.data_ptr() for cache in _distinct(self.kv_caches)]
        indices = [pointers.index(layer.kv_cache.data_ptr()) for layer in probed.layers]
        keys = [partial(engine.keys, index) for index in indices]
        return CpuProbe(ring, keys, probed.heads, num_rows)

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        shard = self._shard()
        before_forward(shard, scheduler_output, self._splice)
        output = super().execute_model(scheduler_output, *args, **kwargs)
        report = after_forward(shard, scheduler_output)
        if output is None:  # tokens follow in sample_tokens
            self._report = report
            return None
        return attach(output, report)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        report, self._report = self._report, None
        return attach(super().sample_tokens(*args, **kwargs), report)

    def _splice(self, splice: Splice) -> None:
        state = self.requests[splice.request_id]
        state.block_ids = (splice.apply(state.block_ids[0]),)
        # A request that is not scheduled in this step is not in the batch.
        index = self.input_batch.req_id_to_index.get(splice.request_id)
        if index is not None:
            self.input_batch.block_table.add_row(state.block_ids, index)

    def _row_of(self, request_id: str) -> list[int] | None:
        state = self.requests.get(request_id)
        return list(state.block_ids[0]) if state is not None else None

    def _shard(self) -> Shard:
        assert self.shard is not None, "initialize_kv_cache has not run"
        return self.shard

    def _wrap_slot_mapping(self) -> None:
        """Substitute indices for positions where slots are looked up, and attention lengths.

        vLLM has just filled ``seq_lens`` when it calls this, and only attention metadata reads
        it afterwards.
        """
        table = self.input_batch.block_table
        stock = table.compute_slot_mapping

        def compute_slot_mapping(
            num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor
        ) -> None:
            self.num_hook_calls += 1
            shifts = self._shifts(num_reqs)
            if self._probe is None and shifts is None:
                return stock(num_reqs, query_start_loc, positions)
            lengths = (query_start_loc[1:] - query_start_loc[:-1]).long()
            if self._probe is not None:
                request_ids = self.input_batch.req_ids[:num_reqs]
                self._probe.begin_step(request_ids, lengths, positions)
            if shifts is not None:
                positions = positions - torch.repeat_interleave(
                    shifts, lengths, output_size=positions.shape[0]
                )
                self.seq_lens[:num_reqs] -= shifts.to(self.seq_lens.dtype)
            stock(num_reqs, query_start_loc, positions)

        table.compute_slot_mapping = compute_slot_mapping

    def _shifts(self, num_reqs: int) -> torch.Tensor | None:
        """int64 ``[num_reqs]`` in batch order, or None if all are 0."""
        shard = self._shard()
        if not shard.tables:
            return None
        shifts = [shard.shift(request_id) for request_id in self.input_batch.req_ids[:num_reqs]]
        return torch.tensor(shifts) if any(shifts) else None


def _distinct(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return list({tensor.data_ptr(): tensor for tensor in tensors}.values())
