# SPDX-License-Identifier: Apache-2.0
"""The most blocks in use at any step, from vLLM's own statistics.

It reads what vLLM's scheduler reports after each step, so it is the same instrument for a stock
engine and for vToken, and a short peak between two scrapes is not lost.
"""

from typing import Any

from prometheus_client import REGISTRY, Gauge
from vllm.v1.metrics.loggers import StatLoggerBase

NAME = "kv_peak_blocks_in_use"


class BlockPeak(StatLoggerBase):
    """A vLLM stat logger with one gauge, `kv_peak_blocks_in_use`."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._cache_config = vllm_config.cache_config
        self._peak = 0
        self._gauge = _gauge()
        self._gauge.set(0)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None:
            return
        # vLLM reports a share of all blocks but the null block.
        usable = self._cache_config.num_gpu_blocks - 1
        self._peak = max(self._peak, round(scheduler_stats.kv_cache_usage * usable))
        self._gauge.set(self._peak)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


def _gauge() -> Gauge:
    """The process's gauge; a second engine in one process takes over the first one's."""
    known = REGISTRY._names_to_collectors.get(NAME)
    if isinstance(known, Gauge):
        return known
    return Gauge(NAME, "Most KV blocks in use at any step since the engine started")
