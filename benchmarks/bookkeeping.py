# SPDX-License-Identifier: Apache-2.0
"""What token eviction costs the engine scheduler per step, on the CPU, without a model.

The real AsyncScheduler and ours run side by side on the same load: N decoding requests of about
8K tokens, eviction on (random, half kept), memory ample, so that policies run and nothing is
reclaimed. Steps alternate, one of each; a step is schedule() + update_from_output().

    python -m benchmarks.bookkeeping [--steps 300] [--repeats 3]
"""

import argparse
import gc
import json
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import Part, spread, write_result

BLOCK_SIZE = 32
LENGTH = 8192
TICK = 64
DEPTH = 2
LOADS = (1, 64, 512)
OPTIONS = {"policy": "random", "keep_ratio": 0.5, "tick_tokens": TICK}
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 32768,
}


def make_config(folder: str, vtoken: bool, num_requests: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    ours: dict[str, Any] = {}
    if vtoken:
        ours = {
            "scheduler_cls": "worker.scheduler.VTokenScheduler",
            "worker_cls": "worker.cpu_worker.VTokenCPUWorker",
            "additional_config": {"vtoken": OPTIONS},
        }
    config = EngineArgs(
        model=folder,
        load_format="dummy",
        dtype="float32",
        skip_tokenizer_init=True,
        block_size=BLOCK_SIZE,
        max_model_len=2 * LENGTH,
        max_num_batched_tokens=LENGTH * num_requests,
        max_num_seqs=num_requests,
        **ours,
    ).create_engine_config()
    config.scheduler_config.async_scheduling = True
    return config


def make_scheduler(folder: str, vtoken: bool, num_requests: int) -> Any:
    import torch
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from worker.scheduler import VTokenScheduler

    config = make_config(folder, vtoken, num_requests)
    num_blocks = 2 * num_requests * (LENGTH // BLOCK_SIZE + 32)
    config.cache_config.num_gpu_blocks = num_blocks
    register_all_kvcache_specs(config)
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32
    )
    cache = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    kind = VTokenScheduler if vtoken else AsyncScheduler
    return kind(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        log_stats=False,
    )


def make_requests(num_requests: int) -> list[Any]:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    return [
        Request(
            request_id=f"r{i}",
            prompt_token_ids=[i, *range(LENGTH - 1)],
            sampling_params=SamplingParams(max_tokens=LENGTH, ignore_eos=True),
            pooling_params=None,
            block_hasher=hasher,
        )
        for i in range(num_requests)
    ]


def fill(driver: "Driver", num_requests: int) -> None:
    """Let the requests arrive evenly over TICK steps, so that later each step has its share of
    policy runs; then step until every policy has run while decoding."""
    requests = make_requests(num_requests)
    for step in range(2 * TICK + 8):
        for request in requests[step::TICK] if step < TICK else ():
            driver.scheduler.add_request(request)
        driver.step()


class Driver:
    """Steps one scheduler with DEPTH outputs in flight and times it."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.in_flight: deque[Any] = deque()

    def step(self) -> float:
        """Seconds of schedule() + update_from_output()."""
        start = time.perf_counter()
        output = self.scheduler.schedule()
        elapsed = time.perf_counter() - start
        self.in_flight.append(output)
        if len(self.in_flight) < DEPTH:
            return elapsed
        oldest = self.in_flight.popleft()
        answer = self._answer(oldest)
        start = time.perf_counter()
        self.scheduler.update_from_output(oldest, answer)
        return elapsed + time.perf_counter() - start

    def _answer(self, output: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[[7] for _ in ids],
        )


def measure_steps(folder: str, num_requests: int, steps: int) -> dict[str, float]:
    """Median microseconds of a step of each kind, over interleaved steps."""
    drivers = [Driver(make_scheduler(folder, ours, num_requests)) for ours in (False, True)]
    for driver in drivers:
        fill(driver, num_requests)
    gc.collect()
    gc.freeze()
    times = np.array([[driver.step() for driver in drivers] for _ in range(steps)]) * 1e6
    stats = drivers[1].scheduler.reclaimer.stats
    evicting = drivers[1].scheduler.reclaimer.requests
    assert stats.plans_prepared == 0, "memory was to be ample"
    assert len(evicting) == num_requests, "every request was to evict"
    assert min(request.totals.tokens_evicted for request in evicting.values()) > 0
    gc.unfreeze()
    stock, ours = np.median(times, axis=0)
    return {
        "requests": num_requests,
        "stock_us": float(stock),
        "vtoken_us": float(ours),
        "step_us": float(ours - stock),
        "mean_us": float(np.mean(times[:, 1] - times[:, 0])),
        "p99_us": float(np.percentile(times[:, 1], 99) - np.percentile(times[:, 0], 99)),
    }


def measure_ticks(ticks: int) -> dict[str, float]:
    """Microseconds of one policy run on a request of 8K tokens, 64 of them new."""
    from vtoken.options import parse_replica_options
    from vtoken.request import EvictingRequest

    request = EvictingRequest("r", 1, parse_replica_options(OPTIONS), BLOCK_SIZE)
    times, num_blocks = [], 0
    for length in range(TICK, LENGTH + TICK * ticks, TICK):
        new = range(num_blocks, -(-length // BLOCK_SIZE))
        num_blocks += len(new)
        start = time.perf_counter()
        request.tick(list(new), length)
        if length >= LENGTH:
            times.append((time.perf_counter() - start) * 1e6)
    return {"tick_us": float(np.median(times)), "p99_us": float(np.percentile(times, 99))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        for repeat in range(arguments.repeats):
            for load in LOADS:
                row = measure_steps(folder, load, arguments.steps)
                print({key: round(value, 1) for key, value in row.items()}, flush=True)
                rows.append({"repeat": repeat, **row})
    ticks = [measure_ticks(32) for _ in range(max(3, arguments.repeats))]
    summary = {
        f"step_us_{load}": spread([row["step_us"] for row in rows if row["requests"] == load])
        for load in LOADS
    }
    summary["step_us_512_mean"] = spread([r["mean_us"] for r in rows if r["requests"] == LOADS[-1]])
    summary["step_us_512_p99"] = spread([r["p99_us"] for r in rows if r["requests"] == LOADS[-1]])
    summary["tick_us_8k"] = spread([tick["tick_us"] for tick in ticks])
    summary["tick_us_8k_p99"] = spread([tick["p99_us"] for tick in ticks])
    config = {"steps": arguments.steps, "length": LENGTH, "depth": DEPTH, "options": OPTIONS}
    path = write_result("bookkeeping", Part(config, summary, rows))
    print(json.dumps(summary, indent=1))
    print(path.name)


if __name__ == "__main__":
    main()
