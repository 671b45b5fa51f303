# SPDX-License-Identifier: Apache-2.0
"""The command refuses what cannot work before it starts anything."""

import shlex
import socket
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cluster.cli import _example, app

# Scripts and manifests use them: removing or renaming one is a breaking change.
SERVE_FLAGS = {
    "--model",
    "--served-model-name",
    "--max-model-len",
    "--num-gpu-blocks",
    "--gpus",
    "--engine",
    "--stock",
    "--policy",
    "--budget",
    "--keep-ratio",
    "--seed",
    "--backend",
    "--reclaim",
    "--option",
    "--host",
    "--port",
    "--replicas",
    "--max-ongoing-requests",
    "--max-queued-requests",
    "--drain",
}


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a refused command must start nothing")

    monkeypatch.setattr("ray.init", refuse)
    monkeypatch.setattr("worker.model.default_model", refuse)


def serve(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["serve", *arguments])


def test_flags_are_frozen() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert set(commands) == {"serve", "demo"}
    flags = {flag for parameter in commands["serve"].params for flag in parameter.opts}
    assert flags - {"--help"} == SERVE_FLAGS
    assert [flag for parameter in commands["demo"].params for flag in parameter.opts] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "h3o"], "`policy`='h3o' is unknown"),
        (["--policy", "random"], "evicts nothing without a limit"),
        (["--budget", "64"], "have no effect with policy keep_all"),
        (["--policy", "random", "--budget", "3"], "raise it to at least 36"),
        (["--policy", "random", "--keep-ratio", "1.5"], "`keep_ratio`=1.5"),
        (["--backend", "magic"], "`backend`='magic'"),
        (["--reclaim", "never"], "`reclaim`='never'"),
        (["--option", "tick_token=64"], "`tick_token` is not an option"),
        (["--option", "tick_tokens"], "write NAME=VALUE"),
        (["--engine", "max_num_seqs"], "write NAME=VALUE"),
        (["--stock", "--policy", "random"], "--stock evicts nothing"),
        (["--port", "99999"], "between 1 and 65535"),
        (["--model", "./no/such/folder"], "there is no such folder"),
        (["--model", "m", "--replicas", "0"], "replicas:"),
        (["--model", "m", "--engine", "worker_cls=x"], "worker_cls cannot be set here"),
    ],
)
def test_mistake_ends_with_status_2_and_its_name(arguments: list[str], message: str) -> None:
    result = serve(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_taken_port_is_refused_before_the_model_loads(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = serve("--model", str(tmp_path), "--port", str(port))
    assert result.exit_code == 1
    assert f"cannot listen on 127.0.0.1:{port}" in result.output


def test_example_survives_a_shell() -> None:
    words = shlex.split(_example("http://127.0.0.1:8000", "it's a model"))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert '"model": "it\'s a model"' in words[-1]
