# SPDX-License-Identifier: Apache-2.0
"""One replica's engine behind vLLM's own OpenAI app.

Everything that a front end needs from vLLM is here: build the engine, build the ASGI app, ask for
health, close. The app is vLLM's (`build_app` and `init_app_state`), so protocol, errors and
cancellation are vLLM's too. A stock replica imports nothing of `vtoken`.
"""

import os
from argparse import Namespace
from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

from worker.environment import PLUGIN_NAME
from worker.peak import BlockPeak

# Measured on two cores: 148 tokens/s against 53 with vLLM's defaults, and torch.compile costs
# two minutes at each start. vLLM's CPU attention wants a block size that is a multiple of 32.
# Without a size for the KV cache vLLM claims 92 % of the machine's memory.
CPU_DEFAULTS = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "kv_cache_memory_bytes": 2**30,
}


class EngineFacade:
    """A running engine and its app. Made by `start`, ended by `close`."""

    def __init__(self, engine: AsyncLLM, app: FastAPI, lifespan: AsyncExitStack) -> None:
        self.engine = engine
        self.app = app
        self._lifespan = lifespan

    @classmethod
    async def start(
        cls, engine_args: Mapping[str, Any], options: Mapping[str, Any] | None
    ) -> "EngineFacade":
        """Start an engine: stock vLLM when `options` is None, else with these vToken options.

        `engine_args` are names and values of vLLM's own server arguments. Blocks the event loop
        until the model is loaded. Raises ValueError for an unknown argument and RuntimeError when
        the process lacks `replica_environment()`; an engine that started is stopped on failure.
        """
        _check_plugins(stock=options is None)
        if current_platform.is_cpu():
            _use_all_cores()
        args = server_arguments(engine_args, options)
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config(
            UsageContext.OPENAI_API_SERVER
        )
        engine = AsyncLLM.from_vllm_config(
            config, usage_context=UsageContext.OPENAI_API_SERVER, stat_loggers=[BlockPeak]
        )
        async with AsyncExitStack() as undo:
            undo.callback(engine.shutdown)
            tasks = await engine.get_supported_tasks()
            app = build_app(args, tasks, engine.model_config)
            # vLLM's error handlers ask the HTTP server to exit once the engine is dead. Serve
            # does that job here, by `check_health`.
            app.state.server = SimpleNamespace(should_exit=False)
            await init_app_state(engine, app.state, args, tasks)
            _check_endpoints(app, stock=options is None)
            await undo.enter_async_context(app.router.lifespan_context(app))
            return cls(engine, app, undo.pop_all())
        raise AssertionError("unreachable: the block above returns or raises")

    async def check_health(self) -> None:
        """Raise vLLM's EngineDeadError when the engine is gone."""
        await self.engine.check_health()

    async def close(self) -> None:
        """Stop the app and the engine's processes; running requests are cut. Safe to repeat."""
        await self._lifespan.aclose()


def server_arguments(
    engine_args: Mapping[str, Any], options: Mapping[str, Any] | None
) -> Namespace:
    """vLLM's server arguments with ours laid over them; raises ValueError for unknown names."""
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    wanted = {
        **(CPU_DEFAULTS if current_platform.is_cpu() else {}),
        **engine_args,
        **({} if options is None else _plugin_arguments(options)),
    }
    for name, value in wanted.items():
        if not hasattr(args, name):
            raise ValueError(f"vLLM has no server argument {name!r}")
        setattr(args, name, value)
    validate_parsed_serve_args(args)
    return args


def _use_all_cores() -> None:
    """Let the worker process, which inherits it, compute on every core.

    vLLM keeps one core for its other processes. Of two cores that is half the machine, and those
    processes hardly need it: measured, 55 tokens/s with one core for them and 74 with none.
    """
    if len(os.sched_getaffinity(0)) == 2:
        os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")


def _plugin_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    # Imported here: it imports vtoken, which a stock replica does without.
    from worker.compat import SCHEDULER, worker_class

    return {
        "scheduler_cls": SCHEDULER,
        "worker_cls": worker_class(),
        "additional_config": {"vtoken": dict(options)},
    }


def _check_plugins(*, stock: bool) -> None:
    """vLLM logs and skips what it cannot load, so what it was told is checked here."""
    allowed = envs.VLLM_PLUGINS
    if stock and (allowed is None or PLUGIN_NAME in allowed):
        raise RuntimeError("a stock engine needs VLLM_PLUGINS='' in its environment")
    if not stock and (allowed is None or PLUGIN_NAME not in allowed):
        raise RuntimeError(f"a vToken engine needs VLLM_PLUGINS={PLUGIN_NAME} in its environment")


def _check_endpoints(app: FastAPI, *, stock: bool) -> None:
    names = [plugin.name for plugin in app.state.endpoint_plugins]
    if not stock and PLUGIN_NAME not in names:
        raise RuntimeError("vLLM did not load vToken's endpoint plugin; see its log above")
