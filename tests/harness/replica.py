"""One replica without an engine: the real scheduler with several outputs in flight."""

import copy
import functools
import json
import tempfile
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from harness.fake_worker import NUM_TOKEN_IDS, FakeWorker, Fault
from vtoken.audit import AuditTrail
from worker.plugin import register
from worker.scheduler import VTokenScheduler

BLOCK_SIZE = 32
MAX_MODEL_LEN = 512
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "vocab_size": 256,
}


@dataclass(frozen=True)
class Setting:
    """How one replica of the harness is set up."""

    depth: int = 2
    num_blocks: int = 25  # the null block included
    max_batched: int = 128
    priority: bool = False
    caching: bool = True
    reserve: bool = True  # vLLM's admission gate; off, requests are preempted far more often
    stops: bool = True  # requests end early when they sample token 0
    vtoken: dict[str, Any] = field(default_factory=dict)


@functools.cache
def engine_config() -> VllmConfig:
    register()
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        config = EngineArgs(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            async_scheduling=True,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=512,
            max_num_seqs=8,
            scheduler_cls="worker.scheduler.VTokenScheduler",
            worker_cls="worker.cpu_worker.VTokenCPUWorker",
        ).create_engine_config()
    register_all_kvcache_specs(config)
    return config


def make_scheduler(setting: Setting) -> VTokenScheduler:
    config = copy.copy(engine_config())
    assert config.max_concurrent_batches == 2, "vLLM has switched async scheduling off"
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.num_gpu_blocks = setting.num_blocks
    config.cache_config.enable_prefix_caching = setting.caching
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.policy = "priority" if setting.priority else "fcfs"
    # Short texts, still in chunks.
    ours = {"check": True, "min_chunk_tokens": BLOCK_SIZE, "probe": True, "probe_queries": 8}
    config.additional_config = {"vtoken": ours | setting.vtoken}
    spec = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)
    scheduler = VTokenScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(setting.num_blocks, [], [KVCacheGroupSpec(["0"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )
    assert (scheduler.policy == SchedulingPolicy.PRIORITY) == setting.priority
    # Three outputs in flight are what pipelining would do; no engine on this platform does.
    scheduler.depth, scheduler.admission.steps = setting.depth, setting.depth + 1
    scheduler.max_num_scheduled_tokens = setting.max_batched
    scheduler.scheduler_reserve_full_isl = setting.reserve
    scheduler.reclaimer.audit = AuditTrail(keep=True)
    return scheduler


class Replica:
    """A scheduler, a worker, and up to ``depth`` outputs between them."""

    def __init__(self, setting: Setting, fault: Fault | None = None) -> None:
        self.setting = setting
        self.scheduler = make_scheduler(setting)
        self.worker = FakeWorker(setting.num_blocks, BLOCK_SIZE, fault)
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.hasher = get_request_block_hasher(BLOCK_SIZE, sha256) if setting.caching else None
        self.healthy = True
        self.counts: Counter[str] = Counter()
        self.finished: list[list[int]] = []
        self._num_requests = 0

    # -- what an engine does -------------------------------------------------------------------

    def arrive(
        self, tokens: list[int], max_tokens: int, request_id: str = "", **options: Any
    ) -> str:
        """Add a request; its id."""
        self._num_requests += 1
        request_id = request_id or f"r{self._num_requests}"
        params = SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=[0] if self.setting.stops else [],
            skip_reading_prefix_cache=self._num_requests % 5 == 0,
            extra_args={f"vtoken.{name}": value for name, value in options.items()},
        )
        params.update_from_generation_config({}, eos_token_id=None)
        request = Request(
            request_id=request_id,
            prompt_token_ids=tokens[: MAX_MODEL_LEN - 1],
            sampling_params=params,
            pooling_params=None,
            block_hasher=self.hasher,
            priority=self._num_requests % 3,
            arrival_time=self._num_requests,
        )
        self.scheduler.add_request(request)
        self.worker.oracle.options[request_id] = self.scheduler.eviction[request_id]
        self.counts["arrivals"] += 1
        return request_id

    def resubmit(self, request_id: str, tokens: list[int], max_tokens: int, **options: Any) -> None:
        """Abort a request and send another one under its id, before the worker hears of either.
        Outputs in flight come back first: vLLM's own ids are unique among those."""
        while self.in_flight:
            self.process()
        if request_id in self.scheduler.requests:
            self.abort(request_id)
            self.arrive(tokens, max_tokens, request_id, **options)
            self.counts["resubmissions"] += 1

    def schedule(self, lag: int = 0) -> None:
        """Schedule a step and hand it to the worker, if vLLM's engine would; the ``lag`` latest
        copies are still running when the worker has issued it."""
        if not self.scheduler.has_requests():
            return
        if len(self.in_flight) == self.setting.depth:
            self.process()
        self.healthy = False  # until this step has shown nothing wrong
        audit = self.scheduler.reclaimer.audit
        output = self.scheduler.schedule()
        self.worker.oracle.news, audit.rows = audit.rows, []
        self.worker.engine.lag = lag
        self.in_flight.append((output, self.worker.execute(output)))
        self.counts["steps"] += 1
        self.counts["steps at full depth"] += len(self.in_flight) == self.setting.depth
        self.counts["empty steps"] += not output.total_num_scheduled_tokens
        self.counts["resumed"] += len(output.scheduled_cached_reqs.resumed_req_ids)
        new = output.scheduled_new_reqs
        self.counts["prefix hits"] += sum(data.num_computed_tokens > 0 for data in new)
        self.healthy = True

    def process(self) -> None:
        """Let the oldest output in flight arrive."""
        if self.in_flight:
            output, answer = self.in_flight.popleft()
            running = {r.request_id: r for r in self.scheduler.running}
            self.scheduler.update_from_output(output, answer)
            for request_id, request in running.items():
                if request.is_finished():
                    self.finished.append(list(request.all_token_ids))
                    self.counts["finished"] += request_id not in self.scheduler.requests

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.counts["client aborts"] += 1

    def reset(self, running: bool) -> None:
        self.scheduler.reset_prefix_cache(reset_running_requests=running)
        self.counts["resets"] += 1

    # -- at the end ----------------------------------------------------------------------------

    def run_to_the_end(self, max_steps: int = 5000) -> None:
        """Step until nothing is left. Raises AssertionError if requests starve."""
        for _ in range(max_steps):
            if self.scheduler.has_requests():
                self.schedule()
            else:
                self.process()
            if not self.scheduler.has_requests() and not self.in_flight:
                return
        waiting = [r.request_id for r in self.scheduler.waiting]
        raise AssertionError(f"still running after {max_steps} steps; waiting: {waiting}")

    def check_clean(self) -> None:
        """Nothing is left of any request: every block is free, nobody remembers a plan."""
        scheduler, worker = self.scheduler, self.worker
        pool, reclaimer = scheduler.block_manager.block_pool, scheduler.reclaimer
        free = {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
        assert free == set(range(1, self.setting.num_blocks))
        assert all(block.ref_cnt == 0 for block in pool.blocks[1:])
        for left in (
            scheduler.block_manager.req_to_blocks,
            scheduler.block_manager.num_cached_block,
            scheduler.block_manager.shift,
            scheduler.eviction,
            scheduler.admission._footprints,
            reclaimer.requests,
            reclaimer.totals,
            reclaimer.two_phase.open_plans,
            reclaimer.planner._dirty,
            reclaimer.planner._wasteful,
            worker.rows,
            worker.shard.tables,
            worker.shard.incarnations,
            worker.shard._open,
            worker.shard._copying,
            worker.engine.copies,
        ):
            assert not left, left
        assert scheduler.admission.growth_blocks() == 0


def prompt(family: int, length: int) -> list[int]:
    """A prompt that shares its prefix with the others of its family."""
    return [1 + (family * 31 + i * (7 + family)) % (NUM_TOKEN_IDS - 1) for i in range(length)]
