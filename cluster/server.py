# SPDX-License-Identifier: Apache-2.0
"""A private Ray cluster on this machine, the application on it, and the end of both.

`vtoken serve`, the demo and the tests run servers through this file. On a cluster that already
exists the application is deployed with Serve's own tools, from `cluster.app:build`.
"""

import logging
import os
import re
import secrets
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import psutil
import ray
from ray import serve
from ray.serve import Application, RunTarget
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from cluster.app import build, build_replicas
from cluster.settings import AppSettings

APP_NAME = "vtoken"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Requests and answers are small and pass by value; Ray would reserve a third of the memory.
OBJECT_STORE_BYTES = 128 * 2**20
# Ray's own processes end within a second or two; an engine that hangs must not survive.
LEFTOVER_GRACE_S = 10.0

# The line where a traceback names the exception, as in "package.module.SomeError: message".
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Failed)(:|$)")


class ServerFailed(RuntimeError):
    """The server did not start; the message says why or where to look."""


@dataclass(frozen=True)
class LocalCluster:
    """A running cluster: where it answers, and the folder of its log files."""

    url: str
    logs: str


@contextmanager
def running_server(settings: AppSettings, *, host: str, port: int) -> Iterator[str]:
    """Run a cluster with the application while the block runs; yield the server's base URL.

    Raises ServerFailed when it does not become ready. Afterwards no process is left.
    """
    gpus = settings.replicas * settings.gpus_per_replica
    with (
        local_cluster(host, port, cpus=settings.replicas + 1, gpus=gpus) as cluster,
        running_app(build(settings), cluster),
    ):
        yield cluster.url


@contextmanager
def local_cluster(host: str, port: int, *, cpus: int, gpus: int = 0) -> Iterator[LocalCluster]:
    """Run Ray and Serve's proxy on this machine while the block runs.

    When the block ends, every process that was started in it has ended too; signals that ask to
    stop are ignored meanwhile. Raises ServerFailed when the port is taken.
    """
    _check_port(host, port)
    _prepare_environment()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        with _signal_handlers_kept():
            context = ray.init(
                address="local",
                num_cpus=cpus,
                num_gpus=gpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
            )
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": host, "port": port},
            logging_config=_quiet(),
        )
        logs = f"{context.address_info['session_dir']}/logs"
        yield LocalCluster(f"http://{host}:{port}", logs)
    finally:
        with _signals_ignored():
            _stop_everything()


@contextmanager
def running_app(target: Application, cluster: LocalCluster) -> Iterator[None]:
    """Run an application on this process's cluster, at its URL, while the block runs.

    Raises ServerFailed when it does not become ready.
    """
    with _running([RunTarget(target, APP_NAME, logging_config=_quiet())], cluster):
        yield


@contextmanager
def running_replicas(
    settings: Mapping[str, AppSettings], cluster: LocalCluster
) -> Iterator[dict[str, DeploymentHandle]]:
    """Run replicas without a front door while the block runs; all of them start side by side.

    Yields a handle for each name. Raises ServerFailed when one does not become ready.
    """
    targets = [
        RunTarget(build_replicas(each), name, route_prefix=None, logging_config=_quiet())
        for name, each in settings.items()
    ]
    with _running(targets, cluster) as handles:
        yield dict(zip(settings, handles, strict=True))


@contextmanager
def _running(targets: list[RunTarget], cluster: LocalCluster) -> Iterator[list[DeploymentHandle]]:
    names = [target.name for target in targets]
    try:
        handles = serve.run_many(targets)
    except RuntimeError as error:
        raise ServerFailed(f"{_reason(names) or error}\nThe logs are in {cluster.logs}") from error
    try:
        yield handles
    finally:
        with _signals_ignored():
            for name in names:
                serve.delete(name)


def _reason(names: list[str]) -> str:
    """The errors that the applications' failed deployments report; Serve's own names none."""
    applications = serve.status().applications
    deployments = (applications[name].deployments.values() for name in names)
    messages = (deployment.message for deployment in chain.from_iterable(deployments))
    return "\n".join(last_error(message) for message in messages if message)


def last_error(traceback: str) -> str:
    """The last exception of a traceback in text, with all lines of its message."""
    lines = traceback.rstrip().splitlines()
    heads = [i for i, line in enumerate(lines) if _EXCEPTION.match(line)]
    others = [i for i, line in enumerate(lines) if not line.startswith(" ")]
    return "\n".join(lines[max(heads or others, default=0) :])


def _stop_everything() -> None:
    # Listed first: a process whose parent has ended is no longer anyone's child.
    started = psutil.Process().children(recursive=True)
    try:
        # Not `serve.shutdown()`: the applications are deleted by now, and Ray reports the end of
        # Serve's controller, which that call asks for, as an error.
        ray.shutdown()
    finally:
        _, alive = psutil.wait_procs(started, timeout=LEFTOVER_GRACE_S)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive)


def _check_port(host: str, port: int) -> None:
    """Serve would find out only after the model is loaded, and try again for a while."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServerFailed(f"cannot listen on {host}:{port}: {error.strerror}") from error


def _prepare_environment() -> None:
    """Settings that Ray takes from the environment only; the user's own win."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray runs its workers at the lowest priority but four. Here they are what the machine is for,
    # and one engine thread that waits for a core holds up all others at each barrier.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # A new local cluster wants a token since Ray 2.59. Only this cluster's processes know this
    # one; without it Ray would write one to the home directory, which changes how later clusters
    # of this user start.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _quiet() -> LoggingConfig:
    return LoggingConfig(log_level="WARNING", enable_access_log=False)


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Put the caller's handlers back after the block; `ray.init` installs one for SIGTERM."""
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    yield
    if threading.current_thread() is threading.main_thread():
        for number, handler in zip(STOP_SIGNALS, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """Ignore the stop signals in the block, where this thread may decide that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _signal_handlers_kept():
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        yield
