# SPDX-License-Identifier: Apache-2.0
"""One engine in this process under a load, with the same instruments whoever schedules."""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arms import Arm
from benchmarks.quality.texts import all_topics
from benchmarks.shapes import is_real

DEFAULTS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "enable_prefix_caching": True,
    "async_scheduling": True,
    "kv_cache_memory_bytes": 2**30,  # nothing is profiled: num_gpu_blocks_override decides
    "gpu_memory_utilization": 0.1,  # only asked for when an engine starts beside others
}


@dataclass(frozen=True)
class Load:
    """Equal requests with random-looking prompts that share nothing.

    Attributes:
        concurrency: requests in flight, the next one sent when one ends; 0: all at once.
        options: vToken's options of each request, without their prefix.
    """

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


class Engine:
    """vLLM as the arm wants it.

    Attributes:
        scheduler: the engine's own, vLLM's or ours.
        vtoken: whether it is ours.
    """

    def __init__(self, arm: Arm, model: str) -> None:
        arguments = {"model": model, **DEFAULTS, **arm.engine}
        self.real_text = all_topics(Path(model)) if is_real(arm.shape) else None
        if self.real_text is not None:
            arguments["load_format"] = "auto"
        if arm.options is None:
            os.environ["VLLM_PLUGINS"] = ""
        else:
            from worker.compat import SCHEDULER, worker_class
            from worker.plugin import register

            register()
            arguments |= {"scheduler_cls": SCHEDULER, "worker_cls": worker_class()}
            arguments["additional_config"] = {"vtoken": dict(arm.options)}
        from vllm import LLM
        from vllm.platforms import current_platform

        if current_platform.is_cpu():  # for a look at a benchmark's own working
            size = -(-arguments.get("block_size", 32) // 32) * 32
            arguments |= {"dtype": "float32", "enforce_eager": True, "block_size": size}
        self.llm = LLM(**arguments)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.vtoken = arm.options is not None
        self.vocabulary = self.llm.llm_engine.model_config.get_vocab_size()

    def close(self) -> None:
        self.core.shutdown()

    def run(self, load: Load, stop: Callable[["Watch"], bool] | None = None) -> dict[str, Any]:
        """Carry out a load; what was seen. ``stop``, asked after each step, aborts what is left."""
        assert self.llm.reset_prefix_cache()
        engine, watch, before = self.llm.llm_engine, Watch(self.scheduler), self._counters()
        latencies = watch.latencies
        waiting = deque(range(load.num_requests))
        sent: dict[str, float] = {}

        def send_what_may_be() -> None:
            while waiting and len(sent) < (load.concurrency or load.num_requests):
                tokens = self.text(load.seed * 997 + waiting.popleft(), load.prompt_tokens)
                sent[self.send(tokens, load.output_tokens, load.options)] = time.perf_counter()

        send_what_may_be()
        begin = time.perf_counter()
        with watch:
            while sent:
                for output in engine.step():
                    if output.finished:
                        latencies.append(time.perf_counter() - sent.pop(output.request_id))
                if stop is not None and stop(watch):
                    engine.abort_request(list(sent))
                    break
                send_what_may_be()
        seconds = time.perf_counter() - begin
        self._finish()
        after = self._counters()
        return {
            "seconds": seconds,
            "tokens_per_s": len(latencies) * load.output_tokens / seconds,
            **percentiles(latencies),
            "finished": len(latencies),
            **watch.seen(),
            **{name: after[name] - before[name] for name in after},
        }

    def send(self, tokens: list[int], output_tokens: int, options: Mapping[str, Any]) -> str:
        """Add one request; its id in vLLM's outputs."""
        from vllm import SamplingParams

        own = {f"vtoken.{name}": value for name, value in options.items()}
        sampling = SamplingParams(
            temperature=0,
            max_tokens=output_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=own if own and self.vtoken else None,
        )
        (request_id,) = self.llm.enqueue([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        return str(request_id).rsplit("-", 1)[0]

    def text(self, number: int, length: int) -> list[int]:
        """Token ids that differ from the first on for every number: text, if the model is real."""
        if self.real_text is not None:
            start = number * 7919 % (len(self.real_text) - length)
            return self.real_text[start : start + length]
        return [(number * 1031 + i * 17) % (self.vocabulary - 10) for i in range(length)]

    def drain(self) -> None:
        """Step until every plan with a gain is carried out (vToken only)."""
        reclaimer = self.scheduler.reclaimer
        reclaimer.reclaim_now()
        while reclaimer.planner.draining:
            self.llm.llm_engine.step()

    def drop_all(self) -> None:
        """Abort whatever runs or waits."""
        engine = self.llm.llm_engine
        ids = [*self.scheduler.requests]
        engine.abort_request([request_id.rsplit("-", 1)[0] for request_id in ids])
        self._finish()

    def _finish(self) -> None:
        while self.llm.llm_engine.has_unfinished_requests():
            self.llm.llm_engine.step()

    def rows(self) -> list[dict[str, Any]]:
        """Of each running request: its tokens, and its blocks by vLLM's own row."""
        (manager,) = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        found = []
        for request in self.scheduler.running:
            size, length = self.scheduler.block_size, request.num_computed_tokens
            row = manager.req_to_blocks[request.request_id]
            counts, live = np.full(len(row), size), length
            if self.vtoken and request.request_id in self.scheduler.reclaimer.requests:
                evicting = self.scheduler.reclaimer.requests[request.request_id]
                counts, live = evicting.table.block_live, evicting.num_live(length)
            found.append(
                {
                    "length": length,
                    "live": live,
                    "blocks": len(row),
                    "shared": sum(block.ref_cnt > 1 for block in row),
                    "ideal": -(-live // size),
                    # The tail is never full for long, whoever evicts.
                    "half_empty": int(np.count_nonzero(counts[:-1] <= size / 2)),
                }
            )
        return found

    def _counters(self) -> dict[str, int]:
        if not self.vtoken:
            return {}
        stats = self.scheduler.reclaimer.stats
        return {
            "plans_committed": stats.plans_committed,
            "plans_aborted": stats.plans_aborted.total(),
            "plans_refused": stats.plans_aborted["refused"] + stats.plans_aborted["diverged"],
            "holes_filled": stats.holes_filled,
            "tokens_moved": stats.tokens_moved,
            "blocks_given_back": stats.blocks_given_back,
        }


def percentiles(latencies: list[float]) -> dict[str, float | None]:
    if not latencies:
        return {"latency_p50_s": None, "latency_p95_s": None}
    middle, high = np.percentile(latencies, [50, 95]).tolist()
    return {"latency_p50_s": middle, "latency_p95_s": high}


class Watch:
    """Reads the scheduler after each schedule(): the same few attributes of vLLM on every arm.

    Attributes:
        latencies: seconds of each request that has ended; filled by the driver.
        last_growth: step in which more requests ran than ever before.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.pool = scheduler.kv_cache_manager.block_pool
        self.steps = self.max_running = self.preemptions = self.peak_blocks = 0
        self.last_growth = 0
        self.latencies: list[float] = []
        self.schedule_seconds = 0.0

    def __enter__(self) -> None:
        schedule = self.scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            output = schedule(*args, **kwargs)
            self.schedule_seconds += time.perf_counter() - begin
            self.steps += 1
            if len(self.scheduler.running) > self.max_running:
                self.max_running, self.last_growth = len(self.scheduler.running), self.steps
            self.preemptions += len(output.preempted_req_ids or ())
            used = self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks()
            self.peak_blocks = max(self.peak_blocks, used)
            return output

        self.scheduler.schedule = watched

    def __exit__(self, *exception: Any) -> None:
        del self.scheduler.schedule

    def seen(self) -> dict[str, float]:
        return {
            "steps": self.steps,
            "max_running": self.max_running,
            "preemptions": self.preemptions,
            "peak_blocks": self.peak_blocks,
            "schedule_ms": self.schedule_seconds / max(1, self.steps) * 1e3,
        }
