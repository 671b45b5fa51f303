# SPDX-License-Identifier: Apache-2.0
"""One engine with CUDA graphs, compilation and two outputs in flight, in this process."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harness.answers import finished_outputs

ARGUMENTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "block_size": 16,
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "num_gpu_blocks_override": 1500,
    "enable_prefix_caching": True,
    "gpu_memory_utilization": 0.2,
}
NUM_PROMPTS, NUM_TOKENS = 20, 160


@dataclass(frozen=True)
class Engine:
    """An engine in this process, and what tests look into."""

    llm: Any = field(repr=False)
    scheduler: Any
    runner: Any

    def run(
        self, prompts: Sequence[list[int]], sampling: Any, after_step: Callable[[], None] = int
    ) -> list[list[int]]:
        """Token ids of each answer."""
        outputs = self.outputs(prompts, sampling, after_step)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def outputs(
        self, prompts: Sequence[list[int]], sampling: Any, after_step: Callable[[], None] = int
    ) -> list[Any]:
        """Finished outputs, from an empty prefix cache."""
        assert self.llm.reset_prefix_cache()
        return finished_outputs(self.llm, prompts, sampling, after_step)


def start(**arguments: Any) -> Engine:
    from vllm import LLM

    llm = LLM(**(ARGUMENTS | arguments))
    core = llm.llm_engine.engine_core.engine_core
    (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
    return Engine(llm, core.scheduler, runner)


def stop(engine: Engine) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    engine.llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


@pytest.fixture(scope="session", autouse=True)
def cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from worker.tiny_model import tiny_model

    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Half of them behind one shared text of 200 tokens."""
    shared = [5 + (i * 31) % 240 for i in range(200)]
    tails = [[5 + (n * 37 + i * 11) % 240 for i in range(60 + 7 * n)] for n in range(NUM_PROMPTS)]
    return [shared + tail if n % 2 else tail for n, tail in enumerate(tails)]


@pytest.fixture(scope="session")
def greedy() -> Callable[..., Any]:
    def make(**options: Any) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            detokenize=False,
            extra_args={f"vtoken.{name}": value for name, value in options.items()} or None,
        )

    return make


@pytest.fixture(scope="session")
def stock_tokens(model: Path, prompts: list[list[int]], greedy: Any) -> list[list[int]]:
    """What stock vLLM answers, on its own engine, before any of our code is loaded."""
    os.environ["VLLM_PLUGINS"] = ""
    engine = start(model=str(model), async_scheduling=True)
    assert "vtoken" not in type(engine.runner).__module__ and not hasattr(engine.runner, "shard")
    tokens = engine.run(prompts, greedy())
    assert engine.run(prompts, greedy()) == tokens, "stock itself repeats"
    stop(engine)
    return tokens


@pytest.fixture(scope="session")
def engine(model: Path, stock_tokens: list[list[int]]) -> Iterator[Engine]:
    from worker.compat import GPU_WORKER, SCHEDULER
    from worker.plugin import register

    register()
    engine = start(
        model=str(model),
        async_scheduling=True,
        scheduler_cls=SCHEDULER,
        worker_cls=GPU_WORKER,
        additional_config={
            "vtoken": {"reclaim": "eager", "theta_f": 0.1, "evict_after_tokens": 0, "probe": True}
        },
    )
    assert engine.scheduler.check and engine.runner.shard.check, "set VTOKEN_CHECK=1"
    yield engine
    stop(engine)
