"""A server for the soak test: vLLM's own module, with a pool so small that requests preempt."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

BLOCK_SIZE, NUM_BLOCKS = 32, 160
AT_ONCE = 24
TICK = 32
OPTIONS = {
    "policy": "random",
    "budget_tokens": 64,
    "sinks": 4,
    "recent": 16,
    "tick_tokens": TICK,
    "evict_after_tokens": 0,
    "reclaim": "eager",
    "theta_f": 0.0,
}


# What differs on a GPU: vLLM's defaults for everything that can be left alone.
ON_A_GPU = {
    "dtype": "bfloat16",
    "block-size": 16,
    "num-gpu-blocks-override": 2 * NUM_BLOCKS + 1,
    "worker-cls": "worker.gpu_worker.VTokenGPUWorker",
    "gpu-memory-utilization": 0.1,
}


@contextmanager
def soak_server(folder: Path, on_gpu: bool = False) -> Iterator[str]:
    """Base URL of a running server; at the end it must stop by itself on SIGTERM."""
    from worker.tiny_model import tiny_model

    model = tiny_model(folder / "tiny")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = {
        "model": model,
        "served-model-name": "tiny",
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "block-size": BLOCK_SIZE,
        "max-model-len": 1024,
        "max-num-seqs": AT_ONCE,
        "num-gpu-blocks-override": NUM_BLOCKS + 1,
        "kv-cache-memory-bytes": 1 << 28,
        "scheduler-cls": "worker.scheduler.VTokenScheduler",
        "worker-cls": "worker.cpu_worker.VTokenCPUWorker",
        "additional-config": json.dumps({"vtoken": OPTIONS}),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--async-scheduling"]
    command += [] if on_gpu else ["--enforce-eager"]
    for name, value in (arguments | (ON_A_GPU if on_gpu else {})).items():
        command += [f"--{name}", str(value)]
    environment = os.environ | {
        "VLLM_PLUGINS": "vtoken",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VTOKEN_CHECK": "1",
    }
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(url, process, log)
        yield url
        assert process.poll() is None, _tail(log)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 420
    while time.monotonic() < deadline:
        assert process.poll() is None, _tail(log)
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.3)
    raise AssertionError(f"not ready in time\n{_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]
