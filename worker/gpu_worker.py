# SPDX-License-Identifier: Apache-2.0
"""vLLM's GPU worker with our model runner."""

from vllm.v1.worker.gpu_worker import Worker

from worker.gpu_runner import VTokenGPUModelRunner


class VTokenGPUWorker(Worker):
    """Set by ``worker_cls``."""

    def _make_model_runner(self) -> VTokenGPUModelRunner:
        return VTokenGPUModelRunner(self.vllm_config, self.device)

    def vtoken_hook_calls(self) -> int:
        """How often the slot-mapping hook has run (collective_rpc)."""
        return self.model_runner.num_hook_calls
