# SPDX-License-Identifier: Apache-2.0
"""`vtoken demo`: the same eight requests to stock vLLM, to naive eviction and to vToken.

Each arm is a fresh server: new engine, new replica, new front door. Naive eviction and vToken run
the same policy with the same seed, so they evict the same tokens at the same steps; they differ
only in what becomes of the memory.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cluster.demo_report import BLOCK_SIZE, Arm, findings, table
from cluster.demo_requests import NUM_TOKENS, conversations, read_metric, send_all
from cluster.import_ledger import ledger_environment, read_ledger
from cluster.server import LocalCluster, ServerFailed, local_cluster, running_app
from cluster.settings import AppSettings
from worker.model import ModelError, default_model

HOST, PORT = "127.0.0.1", 8000
EVICTION = {"policy": "random", "seed": 0, "keep_ratio": 0.5, "reclaim": "eager"}
TEXT_WIDTH = 96


@dataclass(frozen=True)
class Plan:
    """One arm before it runs; `options` is None for stock vLLM."""

    name: str
    options: dict[str, Any] | None


PLANS = (
    Plan("stock vLLM", None),
    Plan("naive eviction", {**EVICTION, "backend": "whole_blocks"}),
    Plan("vToken", {**EVICTION, "backend": "lazy_compaction"}),
)


def run_demo() -> int:
    """Run the three arms and print what they show; return the process's exit status."""
    start = time.monotonic()
    try:
        model = default_model()
        print(
            f"{len(conversations())} chat requests of {NUM_TOKENS} tokens each to {model.name}, "
            f"half of them behind one shared text.\n"
            f"Policy random, seed 0: half of each request's tokens are evicted. CPU, float32, "
            f"blocks of {BLOCK_SIZE}.\n",
            flush=True,
        )
        with local_cluster(HOST, PORT, cpus=2) as cluster, tempfile.TemporaryDirectory() as folder:
            arms = [_run(plan, model, cluster, Path(folder)) for plan in PLANS]
    except (ServerFailed, ModelError) as error:
        print(f"error: {error}")
        return 1
    stock, naive, vtoken = arms
    print(f"\n{table(arms)}\n")
    print("Stock vLLM's row: stored tokens / block size, as it keeps them all. The others: vLLM's")
    print("own row, as the scheduler reports it. Peak: vLLM's own statistics, in all three.\n")
    for arm in arms:
        print(f"{arm.name:14}  ...{_last_line(arm)}")
    print()
    results = findings(stock, naive, vtoken)
    for holds, claim in results:
        print(f"{'ok  ' if holds else 'FAIL'}  {claim}")
    print(f"\n{time.monotonic() - start:.0f} s in all")
    return 0 if all(holds for holds, _ in results) else 1


def _run(plan: Plan, model: Path, cluster: LocalCluster, folder: Path) -> Arm:
    ledger = folder / plan.name
    settings = AppSettings(
        model=str(model),
        served_model_name=model.name,
        options=plan.options,
        engine={"block_size": BLOCK_SIZE},
        environment=ledger_environment(ledger),
        drain_s=5,
    )
    _say(plan, "starting")
    start = time.monotonic()
    with running_app(settings, cluster):
        _say(plan, f"ready after {time.monotonic() - start:.0f} s")
        processes = _engine_processes()
        replies, seconds = send_all(
            cluster.url, lambda tokens, elapsed: _progress(plan, tokens, elapsed)
        )
        peak = int(read_metric(cluster.url, "kv_peak_blocks_in_use"))
    imports = read_ledger(ledger)
    arm = Arm(
        name=plan.name,
        replies=tuple(replies),
        seconds=seconds,
        peak_blocks=peak,
        imports={pid: frozenset(imports[pid]) for pid in processes},
    )
    _say(plan, f"done in {seconds:.0f} s, {arm.tokens_per_s:.0f} tokens/s")
    return arm


def _engine_processes() -> list[int]:
    """The engine core and its workers: the processes that vLLM has named so."""
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if child.name().startswith("VLLM::")]


def _progress(plan: Plan, tokens: int, elapsed: float) -> None:
    total = NUM_TOKENS * len(conversations())
    _say(plan, f"{tokens:5} of {total} tokens, {tokens / elapsed:.0f} tokens/s")


def _say(plan: Plan, text: str) -> None:
    number = PLANS.index(plan) + 1
    print(f"[{number}/{len(PLANS)}] {plan.name:14}  {text}", flush=True)


def _last_line(arm: Arm) -> str:
    """The end of the first answer on one line: what the model says once much was evicted."""
    return " ".join(arm.replies[0].text.split())[-TEXT_WIDTH:]
