# SPDX-License-Identifier: Apache-2.0
"""The `vtoken` command. Ray and vLLM are imported only once the options are known to be right."""

import json
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Serve a model with token-level KV eviction that gives the memory back.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _flag(help_: str) -> Any:
    return typer.Option(help=help_)


_Model = Annotated[str | None, _flag("Path or name [default: SmolLM2-135M-Instruct]")]
_Name = Annotated[str | None, _flag("Its name in the API [default: the path's last part]")]
_MaxLen = Annotated[int | None, _flag("Longest prompt plus answer, in tokens")]
_Blocks = Annotated[int | None, _flag("Blocks in the KV pool [default: what fits]")]
_Gpus = Annotated[int, _flag("GPUs per replica: 0 runs on the CPU; more than 1 only with --stock")]
_Engine = Annotated[list[str], _flag("Another vLLM argument, NAME=VALUE; repeatable")]
_Stock = Annotated[bool, typer.Option("--stock", help="Run stock vLLM, without vToken")]
_Policy = Annotated[str | None, _flag("Which tokens to keep [default: keep_all]")]
_Budget = Annotated[int | None, _flag("Most live tokens per request")]
_Ratio = Annotated[float | None, _flag("Share of a request's tokens that is kept")]
_Seed = Annotated[int | None, _flag("Seed of policies that draw")]
_Backend = Annotated[str | None, _flag("How dead tokens become free blocks")]
_Reclaim = Annotated[str | None, _flag("When: 'pressure', 'eager' or 'adaptive'")]
_Option = Annotated[list[str], _flag("Another vToken option, NAME=VALUE; repeatable")]
_Host = Annotated[str, _flag("Address to listen on")]
_Port = Annotated[int, _flag("Port to listen on")]
_Replicas = Annotated[int, _flag("Engines behind the front door")]
_Ongoing = Annotated[int, _flag("Requests that one replica holds at a time")]
_Queued = Annotated[int, _flag("Requests that wait before clients get 429")]
_Drain = Annotated[float, _flag("Seconds that running requests get when it stops")]


@app.command()
def serve(  # noqa: PLR0913, PLR0917 (one parameter per flag)
    model: _Model = None,
    served_model_name: _Name = None,
    max_model_len: _MaxLen = None,
    num_gpu_blocks: _Blocks = None,
    gpus: _Gpus = 0,
    engine: _Engine = [],  # noqa: B006 (typer copies it)
    stock: _Stock = False,
    policy: _Policy = None,
    budget: _Budget = None,
    keep_ratio: _Ratio = None,
    seed: _Seed = None,
    backend: _Backend = None,
    reclaim: _Reclaim = None,
    option: _Option = [],  # noqa: B006
    host: _Host = "127.0.0.1",
    port: _Port = 8000,
    replicas: _Replicas = 1,
    max_ongoing_requests: _Ongoing = 256,
    max_queued_requests: _Queued = 256,
    drain: _Drain = 30.0,
) -> None:
    """Serve a model through an OpenAI-compatible API until interrupted."""
    options = {
        "policy": policy,
        "budget_tokens": budget,
        "keep_ratio": keep_ratio,
        "seed": seed,
        "backend": backend,
        "reclaim": reclaim,
    }
    engine_args = {
        "max_model_len": max_model_len,
        "num_gpu_blocks_override": num_gpu_blocks,
        "tensor_parallel_size": gpus or None,
    }
    _serve(
        {
            "model": model,
            "served_model_name": served_model_name,
            "options": _eviction_options(_given(options) | _pairs("--option", option), stock),
            "engine": _given(engine_args) | _pairs("--engine", engine),
            "replicas": replicas,
            "gpus_per_replica": gpus,
            "max_ongoing_requests": max_ongoing_requests,
            "max_queued_requests": max_queued_requests,
            "drain_s": drain,
        },
        host,
        port,
    )


@app.command()
def demo() -> None:
    """Show what eviction gives back: stock vLLM, naive eviction and vToken side by side."""
    from cluster.demo import run_demo

    raise typer.Exit(run_demo())


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _pairs(flag: str, texts: list[str]) -> dict[str, Any]:
    """NAME=VALUE texts as a mapping; a value that is JSON is read as JSON, else as text."""
    pairs: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"{flag} {text}: write NAME=VALUE")
        try:
            pairs[name] = json.loads(value)
        except json.JSONDecodeError:
            pairs[name] = value
    return pairs


def _eviction_options(options: dict[str, Any], stock: bool) -> dict[str, Any] | None:
    from vtoken.errors import OptionError
    from vtoken.options import parse_replica_options

    if stock and options:
        raise typer.BadParameter(f"--stock evicts nothing; leave out {', '.join(sorted(options))}")
    try:
        parse_replica_options(options)
    except OptionError as error:
        raise typer.BadParameter(str(error)) from error
    return None if stock else options


def _serve(arguments: dict[str, Any], host: str, port: int) -> None:
    if not 0 < port < 2**16:
        raise typer.BadParameter(f"--port {port}: it must be between 1 and 65535")
    from cluster.settings import AppSettings, SettingsError, parse_settings

    try:
        settings: AppSettings = parse_settings(_with_model(arguments))
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"starting {settings.api_name} on {host}:{port} ...", err=True)

    from cluster.server import ServerFailed, running_server

    try:
        with _signals_interrupt(), running_server(settings, host=host, port=port) as url:
            typer.echo(f"ready: {_example(url, settings.api_name)}")
            signal.pause()
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
    except ServerFailed as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def _with_model(arguments: dict[str, Any]) -> dict[str, Any]:
    """Fill in the default model and its name; refuse a path that leads nowhere."""
    model = arguments["model"]
    if model is None:
        from worker.model import default_model

        model = str(default_model())
    elif model.startswith(("/", ".", "~")) and not Path(model).expanduser().is_dir():
        raise typer.BadParameter(f"--model {model}: there is no such folder")
    path = Path(model).expanduser()
    name = arguments["served_model_name"] or (path.name if path.is_dir() else model)
    return {**arguments, "model": str(path) if path.is_dir() else model, "served_model_name": name}


def _example(url: str, model: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
    header = shlex.quote("content-type: application/json")
    return f"curl {url}/v1/chat/completions -H {header} -d {shlex.quote(json.dumps(body))}"


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Make SIGINT and SIGTERM raise KeyboardInterrupt in the main thread."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
