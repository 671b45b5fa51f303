# SPDX-License-Identifier: Apache-2.0
"""The engine scheduler of a replica: vLLM's AsyncScheduler with reclamation around each step.

COMMIT and ABORT are decided before vLLM schedules, PREPARE after it: freed blocks serve this very
step, and destinations are taken only from what the step left free.
"""

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vtoken.errors import InvariantError, OptionError
from vtoken.options import EvictionOptions, parse_request_options
from vtoken.reclaimer import Reclaimer
from worker.admission import Admission
from worker.block_manager import ROLE, PoolPort, VTokenBlockManager
from worker.compat import check_config, check_kv_cache, replica_options
from worker.invariants import check_replica, checks_enabled
from worker.status import finished_request, replica_status

KEEP_ALL = EvictionOptions()


class VTokenScheduler(AsyncScheduler):
    """Works with one or two outputs in flight. See docs/architecture.md for a step's life."""

    def __init__(
        self, *, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, **kwargs: Any
    ) -> None:
        check_config(vllm_config)
        check_kv_cache(kv_cache_config, kwargs["block_size"], kwargs["hash_block_size"])
        KVCacheSpecRegistry.register_role_manager(ROLE, VTokenBlockManager)
        kv_cache_config.kv_cache_groups[0].role = ROLE
        super().__init__(vllm_config=vllm_config, kv_cache_config=kv_cache_config, **kwargs)
        self.replica_options = replica_options(vllm_config)
        self.depth = vllm_config.max_concurrent_batches
        (self.block_manager,) = self.kv_cache_manager.coordinator.single_type_managers
        self.eviction: dict[str, EvictionOptions] = {}
        self.disabled: set[str] = set()  # requests that go on without their policy
        self.booked_in_full: set[str] = set()
        self.admission = admission = Admission(self)
        port = PoolPort(
            self.block_manager, self._length_of, admission.growth_blocks, admission.surplus
        )
        self.reclaimer = Reclaimer(self.replica_options, self.block_size, 1, port)
        self.block_manager.reclaimer = self.reclaimer
        self.block_manager.cause_of = self._cause_of
        self.block_manager.admission = self.admission
        self.check = checks_enabled(self.replica_options)
        group = kv_cache_config.kv_cache_groups[0]
        page_bytes = group.kv_cache_spec.page_size_bytes * len(group.layer_names)
        self.bytes_per_token = page_bytes // self.block_size
        self.peak_blocks_used = 0
        self.num_preemptions = 0

    # -- hooks of vLLM's scheduler -------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        known = request.request_id in self.requests
        super().add_request(request)
        if known:
            return
        params = request.sampling_params
        try:
            options = parse_request_options(
                params.extra_args if params is not None else None, self.replica_options
            )
        except OptionError:
            # The front end has validated it: reaching this means that ours did not run.
            self._fail(request.request_id)
            options = KEEP_ALL
        # A streaming session comes back with a row of its own making: nothing is evicted.
        options = KEEP_ALL if request.resumable else options
        self.eviction[request.request_id] = options
        if options.evicts:
            self.admission.add(request, options)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        reclaimer = self.reclaimer
        reclaimer.begin_step(self.current_step + 1, self.admission.begin_step())
        output = super().schedule(throttle_prefills)
        for data in output.scheduled_new_reqs:
            self._start(data.req_id, output)
        for request_id in output.scheduled_cached_reqs.resumed_req_ids:
            self._start(request_id, output)
        orders = reclaimer.end_step(self.admission.blocked)
        while reclaimer.failed:
            self._fail(reclaimer.failed.pop())
        while reclaimer.policy_runs.disabled:
            self._disable(reclaimer.policy_runs.disabled.pop())
        while reclaimer.policy_runs.unbounded:
            self._book_in_full(reclaimer.policy_runs.unbounded.pop())
        for request_id in self.booked_in_full:  # it may have given back more since
            self.admission.book_in_full(self.requests[request_id])
        if orders:
            output.vtoken = orders
        used = reclaimer.port.num_blocks() - reclaimer.port.num_free()
        self.peak_blocks_used = max(self.peak_blocks_used, used)
        if self.check:
            check_replica(self)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        report = getattr(model_runner_output, "vtoken", None)
        if report is not None:
            self.reclaimer.report(report)
        elif (orders := getattr(scheduler_output, "vtoken", None)) and orders.wants_answer():
            raise InvariantError("the worker did not answer an order: its hooks do not run")
        return super().update_from_output(scheduler_output, model_runner_output)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        # vLLM's one per-request hook on both scheduling paths; without speculative decoding it
        # does nothing itself. Here: long prompts go in chunks that fit their budget.
        if num_new_tokens > 1 and (chunk := self.admission.chunk(request)):
            return min(num_new_tokens, chunk)
        return num_new_tokens

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self.admission.blocked = True
        self.num_preemptions += 1
        super()._preempt_request(request, *args, **kwargs)
        if request.request_id in self.booked_in_full:
            self.admission.book_in_full(request)  # what it had given back it needs again

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        summary = finished_request(self, request)
        kv_params, ec_params = super()._free_request(request, delay_free_blocks)
        self.reclaimer.forget(request.request_id)
        self.admission.remove(request.request_id)
        self.disabled.discard(request.request_id)
        self.booked_in_full.discard(request.request_id)
        del self.eviction[request.request_id]
        return {**(kv_params or {}), "vtoken": summary}, ec_params

    def shutdown(self) -> None:
        self.reclaimer.audit.write()
        super().shutdown()

    # -- utility calls -------------------------------------------------------------------------

    def vtoken_status(self) -> dict[str, Any]:
        return replica_status(self)

    # -- ours ----------------------------------------------------------------------------------

    def _start(self, request_id: str, output: SchedulerOutput) -> None:
        options = self.eviction[request_id]
        if options.evicts and request_id not in self.disabled:
            request = self.requests[request_id]
            num_hits = request.num_computed_tokens - output.num_scheduled_tokens[request_id]
            span = range(num_hits, request.num_tokens)
            self.reclaimer.start(request_id, options, request.num_prompt_tokens, span)

    def _fail(self, request_id: str) -> None:
        # vLLM ends the requests of this set with FINISHED_ERROR at its next output, visibly.
        self.grammar_compile_error_reqs.add(request_id)

    def _disable(self, request_id: str) -> None:
        """A request goes on without its policy, and does without it should it begin anew."""
        self.disabled.add(request_id)
        self._book_in_full(request_id)

    def _book_in_full(self, request_id: str) -> None:
        """A request will hold more than it was admitted by. If that finds no room, it is the first
        to be preempted, unless priorities say otherwise: the others were admitted by their caps."""
        request = self.requests[request_id]
        self.booked_in_full.add(request_id)
        self.admission.book_in_full(request)
        if request in self.running:
            self.running.remove(request)
            self.running.append(request)

    def _cause_of(self, request_id: str) -> str:
        status = self.requests[request_id].status
        if not RequestStatus.is_finished(status):
            return "preempted"  # vLLM frees the row before it changes the status
        return "aborted" if status == RequestStatus.FINISHED_ABORTED else "finished"

    def _length_of(self, request_id: str) -> int:
        return self.requests[request_id].num_computed_tokens
