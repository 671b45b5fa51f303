"""One in-process engine at a time, on a tiny model, observed from outside."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

BLOCK_SIZE = 32
OURS = {
    "scheduler_cls": "worker.scheduler.VTokenScheduler",
    "worker_cls": "worker.cpu_worker.VTokenCPUWorker",
    "async_scheduling": True,
}


@dataclass
class Engine:
    """An engine and what was seen of it. Everything read here is vLLM's own state."""

    llm: Any
    most_at_once: int = 0
    preemptions: int = 0
    _sent: int = field(default=0)

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def manager(self) -> Any:
        (manager,) = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        return manager

    @property
    def num_free(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(self, prompt: list[int], length: int, **extra: Any) -> str:
        """A request that ends at exactly ``length`` tokens."""
        from vllm import SamplingParams

        rest = length - len(prompt)
        params = SamplingParams(
            max_tokens=rest,
            min_tokens=rest,
            temperature=0,
            ignore_eos=True,
            extra_args=extra or None,
        )
        self._sent += 1
        name = f"request-{self._sent}"
        return self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params) or name

    def step(self) -> list[Any]:
        return self.llm.llm_engine.step()

    def run(self) -> list[Any]:
        finished = []
        while self.llm.llm_engine.has_unfinished_requests():
            finished += [output for output in self.step() if output.finished]
        return finished

    def private_blocks(self, request_id: str) -> int:
        return sum(block.ref_cnt == 1 for block in self.manager.req_to_blocks[request_id])

    def watch(self) -> None:
        """Count vLLM's own preemptions and the requests it schedules in one step."""
        scheduler = self.scheduler
        schedule, preempt = scheduler.schedule, scheduler._preempt_request

        def counting_schedule(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.most_at_once = max(self.most_at_once, len(output.num_scheduled_tokens))
            return output

        def counting_preempt(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        scheduler.schedule, scheduler._preempt_request = counting_schedule, counting_preempt


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from worker.tiny_model import tiny_model

    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def start_engine(tiny: Path) -> Iterator[Callable[..., Engine]]:
    """``start_engine(num_blocks, options)``; options None means stock vLLM. One at a time."""
    running: list[Engine] = []

    def start(num_blocks: int, options: dict[str, Any] | None, **extra: Any) -> Engine:
        from vllm import LLM

        while running:
            _stop(running.pop())
        arguments: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": BLOCK_SIZE,
            "max_model_len": 2048,
            "max_num_seqs": 16,
            # One block is vLLM's null block.
            "num_gpu_blocks_override": num_blocks + 1,
            "kv_cache_memory_bytes": 1 << 28,
        }
        if options is not None:
            arguments |= OURS | {"additional_config": {"vtoken": options}}
        engine = Engine(LLM(model=str(tiny), **(arguments | extra)))
        engine.watch()
        running.append(engine)
        return engine

    yield start
    while running:
        engine = running.pop()
        assert engine.num_free == engine.scheduler.kv_cache_config.num_blocks - 1, "blocks leak"
        _stop(engine)


def _stop(engine: Engine) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    engine.llm.llm_engine.engine_core.shutdown()
    engine.llm = None
    gc.collect()
    cleanup_dist_env_and_memory()
