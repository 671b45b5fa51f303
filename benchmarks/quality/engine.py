# SPDX-License-Identifier: Apache-2.0
"""A vToken engine in this process, set up so that what a policy wants takes effect soon."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality.exact import Eviction

CHUNK = 128  # tokens of a prompt a step: a policy that runs after each is close to one a token


class QualityEngine:
    """Float32, a text's tokens in chunks, reclaiming as soon as a block is won.

    Args:
        num_seqs: requests at once.
        chunk: tokens of a prompt a step.
    """

    def __init__(self, model: Path, num_seqs: int, chunk: int = CHUNK) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        from worker.compat import SCHEDULER, worker_class

        replica = {"policy": "keep_all", "reclaim": "eager", "theta_f": 0.01, "probe": True}
        self.llm = LLM(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            block_size=32,
            max_model_len=8192,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=chunk,
            num_gpu_blocks_override=1600,
            kv_cache_memory_bytes=3 * 2**30,
            enable_prefix_caching=True,
            scheduler_cls=SCHEDULER,
            worker_cls=worker_class(),
            async_scheduling=True,
            additional_config={"vtoken": replica},
            disable_log_stats=True,
        )
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.scheduler.reclaimer.audit.enabled = True

    def probed_layers(self) -> Sequence[int]:
        """Indices of the layers that the probe looks at."""
        from worker.probed_layers import spread

        config = self.llm.llm_engine.vllm_config.model_config.hf_config
        return spread(config.num_hidden_layers, self.scheduler.replica_options.probe_layers)

    def generate(
        self, prompts: Sequence[Sequence[int]], eviction: Eviction, **sampling: Any
    ) -> list[Any]:
        """Greedy answers, in the order of the prompts, with an empty prefix cache. Each has
        ``.audit``, its rows of the audit trail."""
        from vllm import SamplingParams

        assert self.llm.reset_prefix_cache()
        trail = self.scheduler.reclaimer.audit
        trail.rows.clear()
        params = SamplingParams(temperature=0, extra_args=eviction.options(), **sampling)
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        for output in outputs:
            own = [row for row in trail.rows if _base(row["request_id"]) == output.request_id]
            assert len({row["incarnation"] for row in own}) <= 1, "a preempted request"
            output.audit = own
        return outputs


def _base(request_id: str) -> str:
    """The id that the front end knows: the engine's without its random suffix."""
    return request_id.rsplit("-", 1)[0]
