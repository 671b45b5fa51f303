# SPDX-License-Identifier: Apache-2.0
"""What a replica tells about itself over HTTP: `GET /vtoken/status` and `GET /metrics`.

This is a vLLM endpoint plugin, registered under the entry point group `vllm.endpoint_plugins` with
the name `vtoken`. vLLM loads endpoint plugins only when `VLLM_PLUGINS` names them, so without our
cluster it is switched on by

    VLLM_PLUGINS=vtoken python -m vllm.entrypoints.openai.api_server --model MODEL \\
        --scheduler-cls worker.scheduler.VTokenScheduler \\
        --worker-cls worker.cpu_worker.VTokenCPUWorker \\
        --additional-config '{"vtoken": {"policy": "random", "keep_ratio": 0.5}}'

The same plugin installs the hooks that check a request's options before its response starts and
that put what eviction did to it into its `usage`.
"""

from argparse import Namespace
from typing import Any

import prometheus_client
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from vllm.v1.metrics.prometheus import get_prometheus_registry

from vtoken.errors import UnsupportedError
from worker.compat import SCHEDULER, is_vtoken, replica_options
from worker.request_check import install_request_check
from worker.usage import install_usage_hooks

Status = dict[str, Any]


class VTokenEndpoints:
    """The plugin object; vLLM calls `attach_router`, then `init_state`, once per app."""

    name = "vtoken"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the two routes; `GET /metrics` replaces vLLM's own, whose metrics it includes."""
        app.add_api_route("/vtoken/status", self.status, methods=["GET"])
        app.add_api_route("/metrics", self.metrics, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Keep the engine client for the routes and install the hooks on vLLM's serving objects.

        Raises UnsupportedError when the engine runs without vToken's scheduler: routes that then
        fail one by one would hide a server that evicts nothing.
        """
        config = engine_client.vllm_config
        if not is_vtoken(config):
            raise UnsupportedError(
                f"VLLM_PLUGINS names vtoken, but the engine does not use its scheduler: pass "
                f"--scheduler-cls {SCHEDULER}, or leave vtoken out of VLLM_PLUGINS"
            )
        state.vtoken_client = engine_client
        state.vtoken_options = replica_options(config)
        install_request_check(state, state.vtoken_options)
        install_usage_hooks(state)

    async def status(self, request: Request) -> JSONResponse:
        """The engine's numbers at this moment, and the options it runs with."""
        state = request.app.state
        status = await read_status(state.vtoken_client)
        return JSONResponse({**status, "options": state.vtoken_options.model_dump()})

    async def metrics(self, request: Request) -> Response:
        """Prometheus text: vLLM's metrics, then vToken's as of this moment."""
        status = await read_status(request.app.state.vtoken_client)
        own = prometheus_client.CollectorRegistry()
        own.register(StatusCollector(status))
        text = b"".join(
            prometheus_client.generate_latest(registry)
            for registry in (get_prometheus_registry(), own)
        )
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)


async def read_status(engine_client: Any) -> Status:
    """Ask the engine's scheduler process for its numbers."""
    status: Status = await engine_client.engine_core.call_utility_async("vtoken_status")
    return status


class StatusCollector(Collector):
    """Shows one status as Prometheus metrics.

    The engine keeps the totals, so nothing is counted twice when several scrapers read them.
    """

    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> list[Metric]:
        return [*self._gauges(), *self._counters()]

    def _gauges(self) -> list[Metric]:
        status = self._status
        blocks = GaugeMetricFamily(
            "vtoken_blocks",
            "Blocks of the pool; 'live' is what the live tokens need",
            labels=["state"],
        )
        for state in ("total", "live", "free", "reclaimable"):
            blocks.add_metric([state], status[f"blocks_{state}"])
        tokens = GaugeMetricFamily("vtoken_tokens", "Resident tokens", labels=["state"])
        for state in ("live", "dead_resident"):
            tokens.add_metric([state], status[f"tokens_{state}"])
        fragmentation = GaugeMetricFamily(
            "vtoken_fragmentation", "1 - live tokens / (allocated blocks * block size)"
        )
        fragmentation.add_metric([], status["fragmentation"])
        peak = GaugeMetricFamily("vtoken_peak_blocks_used", "Most blocks in use since the start")
        peak.add_metric([], status["peak_blocks_used"])
        return [blocks, tokens, fragmentation, peak]

    def _counters(self) -> list[Metric]:
        status = self._status
        plans = CounterMetricFamily("vtoken_plans", "Relocation plans", labels=["outcome"])
        plans.add_metric(["prepared"], status["plans_prepared"])
        plans.add_metric(["committed"], status["plans_committed"])
        plans.add_metric(["aborted"], sum(status["plans_aborted"].values()))
        aborts = CounterMetricFamily("vtoken_aborts", "Aborted plans", labels=["reason"])
        for reason, count in sorted(status["plans_aborted"].items()):
            aborts.add_metric([reason], count)
        totals = {
            "vtoken_moved_tokens": ("Tokens moved", status["tokens_moved"]),
            "vtoken_moved_bytes": ("Bytes of K/V moved", status["bytes_moved"]),
            "vtoken_blocks_given_back": ("Blocks returned", status["blocks_given_back"]),
            "vtoken_holes_filled": ("Reclaims in place", status["holes_filled"]),
            "vtoken_scores_nan": ("Scores that were no number", status["scores_nan"]),
            "vtoken_policies_disabled": (
                "Requests whose policy failed",
                status["policies_disabled"],
            ),
        }
        return [
            plans,
            aborts,
            *(CounterMetricFamily(name, help_, value) for name, (help_, value) in totals.items()),
        ]
