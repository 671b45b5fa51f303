# SPDX-License-Identifier: Apache-2.0
"""Engines side by side on one device, each in a process of its own, run by turns.

Start-up is paid once, and what is compared ran back to back on one machine. Idle engines wait for
a message and use neither the device nor a core.
"""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.command import short
from benchmarks.shapes import write_model


@dataclass(frozen=True)
class Arm:
    """One engine of a comparison.

    Attributes:
        options: vToken's options of the replica; None runs stock vLLM with nothing disabled.
        shape: a name of ``benchmarks.shapes``.
        engine: further arguments of ``vllm.LLM``.
    """

    name: str
    options: Mapping[str, Any] | None
    shape: str
    engine: Mapping[str, Any] = field(default_factory=dict)


class ArmProcess:
    """An arm's process. Functions given to ``call`` run in it, on its engine."""

    def __init__(self, arm: Arm) -> None:
        self.name = arm.name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        # One folder for each shape: vLLM finds what it compiled for a model by the model's path.
        model = write_model(arm.shape, Path(tempfile.gettempdir(), "vtoken-shapes", arm.shape))
        self._process = context.Process(target=_serve, args=(theirs, arm, model))
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        self._answer()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(engine, *args)`` there; it and its arguments must be picklable.

        Raises:
            RuntimeError: it raised; the message is its traceback.
        """
        self._connection.send((function, args))
        return self._answer()

    def close(self) -> None:
        if self._process.is_alive():
            self._connection.send(None)
        self._process.join(timeout=60)
        if self._process.is_alive():
            self._process.kill()

    def _answer(self) -> Any:
        try:
            ok, value = self._connection.recv()
        except EOFError:
            raise RuntimeError(f"the engine of {self.name} has died") from None
        if not ok:
            raise RuntimeError(f"{self.name}: {value}")
        return value


def _serve(connection: Connection, arm: Arm, model: str) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this very process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from benchmarks.engine import Engine

    try:
        engine = Engine(arm, model)
    except Exception:
        connection.send((False, traceback.format_exc()))
        raise
    connection.send((True, None))
    while (message := connection.recv()) is not None:
        function, args = message
        try:
            connection.send((True, function(engine, *args)))
        except Exception:
            connection.send((False, traceback.format_exc()))
            raise
    engine.close()


@contextmanager
def side_by_side(arms: Sequence[Arm]) -> Iterator[dict[str, ArmProcess]]:
    """All arms' engines, started together, closed in the end."""
    processes = {arm.name: ArmProcess(arm) for arm in arms}
    try:
        for process in processes.values():
            process.wait_until_ready()
        yield processes
    finally:
        for process in processes.values():
            process.close()


def by_turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, arm): each arm once a round, another one first each time."""
    for number in range(rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            yield number, name


def measured_by_turns(
    processes: Mapping[str, ArmProcess],
    rounds: int,
    function: Callable[..., Mapping[str, Any]],
    job: Callable[[int], Sequence[Any]],
) -> list[dict[str, Any]]:
    """A row for each arm and round: ``function(engine, *job(round))``, shown as it comes."""
    rows = []
    for number, name in by_turns(list(processes), rounds):
        row = processes[name].call(function, *job(number))
        rows.append({"round": number, "arm": name, **row})
        print(short(rows[-1]), flush=True)
    return rows
