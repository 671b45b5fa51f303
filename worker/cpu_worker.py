# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker with our model runner."""

from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_worker import CPUWorker

from worker.cpu_runner import VTokenCPUModelRunner


class VTokenCPUWorker(CPUWorker):
    """Set by ``worker_cls``. The stock worker names its runner class at module level."""

    def init_device(self) -> None:
        stock = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = VTokenCPUModelRunner
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = stock

    def vtoken_hook_calls(self) -> int:
        """How often the slot-mapping hook has run (collective_rpc)."""
        return self.model_runner.num_hook_calls
