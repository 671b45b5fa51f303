# SPDX-License-Identifier: Apache-2.0
"""Real engines in this process, real text, and stock vLLM in a process of its own.

Most tests share one engine: SmolLM2, float32, two outputs in flight. What a request keeps is an
option of the request.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from engine.oracle import Oracle
from harness.answers import finished_outputs
from worker.compat import CPU_WORKER, SCHEDULER
from worker.model import default_model

HERE = Path(__file__).parent
ENGINE_ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 320,
    "kv_cache_memory_bytes": 2**29,
    "enable_prefix_caching": True,
}
OUR_ARGUMENTS = {
    "scheduler_cls": SCHEDULER,
    "worker_cls": CPU_WORKER,
    "async_scheduling": True,
    "additional_config": {
        "vtoken": {"policy": "keep_all", "reclaim": "eager", "theta_f": 0.1, "probe": True}
    },
}
EVICTION = {
    "vtoken.budget_tokens": 96,
    "vtoken.tick_tokens": 16,
    "vtoken.evict_after_tokens": 96,
    "vtoken.min_chunk_tokens": 32,  # texts are short here and must still come in chunks
}
NUM_COMPARED = 64  # tokens of each answer that is compared with stock vLLM


@dataclass(frozen=True)
class Engine:
    """An in-process engine, and the objects in it that tests look into."""

    llm: Any = field(repr=False)
    scheduler: Any
    shard: Any

    def run(
        self,
        prompts: Sequence[list[int]],
        sampling: Any,
        after_step: Callable[[], None] = lambda: None,
        *,
        reset: bool = True,
    ) -> list[Any]:
        """Finished outputs, with an empty prefix cache at first unless told otherwise."""
        if reset:
            assert self.llm.reset_prefix_cache()
        return finished_outputs(self.llm, prompts, sampling, after_step)

    def audit_rows(self, request_id: str) -> list[dict[str, Any]]:
        """Rows of the audit trail about one request."""
        rows = self.scheduler.reclaimer.audit.rows
        return [row for row in rows if row["request_id"] == request_id]


_running: dict[str, Engine] = {}


def _start_engine(**arguments: Any) -> Engine:
    from vllm import LLM

    llm = LLM(**arguments)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    scheduler.reclaimer.audit.enabled = True
    (shard,) = llm.collective_rpc(lambda worker: worker.model_runner.shard)
    assert scheduler.check and shard.check, "set VTOKEN_CHECK=1"
    return Engine(llm, scheduler, shard)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Stop all engines after the last test of this folder: other folders start their own."""
    if nextitem is not None and HERE in nextitem.path.parents:
        return
    while _running:
        _, engine = _running.popitem()
        engine.llm.llm_engine.engine_core.shutdown()
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
    gc.collect()


@pytest.fixture(scope="session")
def model() -> Path:
    return default_model()


@pytest.fixture(scope="session")
def start_engine(model: Path) -> Callable[..., Engine]:
    """Gives the engine with these arguments, a running one if there is one."""

    def start(**arguments: Any) -> Engine:
        arguments = ENGINE_ARGUMENTS | {"model": str(model)} | OUR_ARGUMENTS | arguments
        key = json.dumps(arguments, sort_keys=True)
        if key not in _running:
            _running[key] = _start_engine(**arguments)
        return _running[key]

    return start


@pytest.fixture
def engine(start_engine: Callable[..., Engine]) -> Engine:
    """The engine that most tests share: two outputs in flight."""
    engine = start_engine()
    assert engine.scheduler.depth == 2
    return engine


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@pytest.fixture(scope="session")
def passages(model: Path) -> list[list[int]]:
    """Twenty different English texts of at least 320 tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [topics[name] for name in sorted(topics) if len(topics[name]) > 2500][:20]
    tokens = [tokenizer(text)["input_ids"] for text in texts]
    assert len(tokens) == 20 and min(map(len, tokens)) >= 320
    return tokens


@pytest.fixture(scope="session")
def prompts(passages: list[list[int]]) -> list[list[int]]:
    """Twenty prompts of 40 to 141 tokens; every second one begins with the same 70."""
    prefix = passages[0][-70:]
    return [
        (prefix if i % 2 else []) + passage[: 40 + 3 * i - 26 * (i % 2)]
        for i, passage in enumerate(passages)
    ]


@pytest.fixture(scope="session")
def greedy() -> Callable[..., Any]:
    """Makes greedy sampling parameters with the options of a request."""
    from vllm import SamplingParams

    def make(options: dict[str, Any], max_tokens: int = NUM_COMPARED) -> Any:
        return SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=1, extra_args=options
        )

    return make


@pytest.fixture(scope="session")
def evicting(greedy: Callable[..., Any]) -> Callable[..., Any]:
    """Makes greedy sampling parameters that keep 96 tokens by a policy; keep_all keeps all."""

    def make(policy: str, max_tokens: int, seed: int = 0) -> Any:
        options = {} if policy == "keep_all" else EVICTION | {"vtoken.seed": seed}
        return greedy(options | {"vtoken.policy": policy}, max_tokens)

    return make


@pytest.fixture(scope="session")
def stock_outputs(
    model: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What stock vLLM answers to the twenty prompts."""
    folder = tmp_path_factory.mktemp("stock")
    job, result = folder / "job.json", folder / "result.json"
    arguments = ENGINE_ARGUMENTS | {"model": str(model)}
    content = {"engine": arguments, "prompts": prompts, "max_tokens": NUM_COMPARED}
    job.write_text(json.dumps(content))
    done = subprocess.run(
        [sys.executable, str(HERE / "stock.py"), str(job), str(result)],
        env=os.environ | {"VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    outputs: list[dict[str, Any]] = json.loads(result.read_text())
    return outputs
