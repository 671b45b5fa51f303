# SPDX-License-Identifier: Apache-2.0
"""`vtoken demo`: the same eight requests to stock vLLM, to naive eviction and to vToken.

Each arm has its own engine and front door. The three engines start side by side, as that is mostly
imports on one core each, and then work one after the other. Naive eviction and vToken run the same
policy with the same seed, so they evict the same tokens at the same steps; they differ only in what
becomes of the memory.
"""

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from ray.serve.handle import DeploymentHandle

from cluster.app import build_front_door
from cluster.demo_report import BLOCK_SIZE, Arm, findings, read_evictions, table
from cluster.demo_requests import NUM_TOKENS, conversations, read_metric, send_all
from cluster.import_ledger import ledger_environment, read_ledger
from cluster.server import LocalCluster, ServerFailed, local_cluster, running_app, running_replicas
from cluster.settings import AppSettings
from worker.model import ModelError, default_model

HOST, PORT = "127.0.0.1", 8000
# At most: an engine that is killed before it has ended leaves no audit trail.
DRAIN_S = 60.0
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
        with tempfile.TemporaryDirectory() as folder:
            arms = _run_all(model, Path(folder))
    except (ServerFailed, ModelError) as error:
        print(f"error: {error}")
        return 1
    print(f"\n{table(arms)}\n")
    print("Stock vLLM's row: stored tokens / block size, as it keeps them all. The others: vLLM's")
    print("own row, as the scheduler reports it. Peak: vLLM's own statistics, in all three.\n")
    for arm in arms:
        print(f"{arm.name:14}  ...{_last_line(arm)}")
    print()
    results = findings(*arms)
    for holds, claim in results:
        print(f"{'ok  ' if holds else 'FAIL'}  {claim}")
    print(f"\n{time.monotonic() - start:.0f} s in all")
    return 0 if all(holds for holds, _ in results) else 1


def _run_all(model: Path, folder: Path) -> list[Arm]:
    settings = {plan.name: _settings(plan, model, folder) for plan in PLANS}
    with local_cluster(HOST, PORT, cpus=len(PLANS)) as cluster:
        print("[0/3] three engines  starting", flush=True)
        start = time.monotonic()
        with running_replicas(settings, cluster) as replicas:
            print(f"[0/3] three engines  ready after {time.monotonic() - start:.0f} s", flush=True)
            arms = [_run(plan, replicas[plan.name], cluster, folder) for plan in PLANS]
    # The audit trails are complete once the engines have stopped.
    return [replace(arm, evictions=read_evictions(folder / arm.name)) for arm in arms]


def _settings(plan: Plan, model: Path, folder: Path) -> AppSettings:
    audit = {"audit_dir": str(folder / plan.name)}
    return AppSettings(
        model=str(model),
        served_model_name=model.name,
        options=None if plan.options is None else {**plan.options, **audit},
        engine={"block_size": BLOCK_SIZE, "kv_cache_memory_bytes": 2**29},
        environment=ledger_environment(_ledger(plan, folder)),
        drain_s=DRAIN_S,
    )


def _run(plan: Plan, replicas: DeploymentHandle, cluster: LocalCluster, folder: Path) -> Arm:
    with running_app(build_front_door(replicas, DRAIN_S), cluster):
        replies, seconds = send_all(
            cluster.url, lambda tokens, elapsed: _progress(plan, tokens, elapsed)
        )
        peak = int(read_metric(cluster.url, "kv_peak_blocks_in_use"))
    imports = read_ledger(_ledger(plan, folder))
    arm = Arm(
        name=plan.name,
        replies=tuple(replies),
        seconds=seconds,
        peak_blocks=peak,
        imports={pid: frozenset(imports[pid]) for pid in _engine_processes() if pid in imports},
    )
    _say(plan, f"done in {seconds:.0f} s, {arm.tokens_per_s:.0f} tokens/s")
    return arm


def _ledger(plan: Plan, folder: Path) -> Path:
    return folder / f"{plan.name} imports"


def _engine_processes() -> list[int]:
    """Every engine core and its workers: the processes that vLLM has named so."""
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
