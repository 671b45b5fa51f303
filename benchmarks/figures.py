# SPDX-License-Identifier: Apache-2.0
"""Draw every figure from the result files alone.

python -m benchmarks.figures [--results benchmarks/results] [--out docs/figures]
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks import plots
from benchmarks.plots import Result
from benchmarks.results import RESULTS

OUT = RESULTS.parents[1] / "docs" / "figures"
# Name of the figure -> its benchmark, and what draws it.
FIGURES: dict[str, tuple[str, Callable[[Axes, Result], None]]] = {
    "capacity": ("capacity", plots.capacity),
    "concurrency": ("capacity", plots.concurrency),
    "contention": ("contention", plots.contention),
    "half_empty": ("waste", plots.half_empty),
    "overhead": ("overhead", plots.overhead),
    "peer": ("peer", plots.peer),
    "prefix": ("prefix", plots.prefix),
    "profile": ("profile", plots.profile),
    "quality": ("quality", plots.quality),
    "retained": ("retained", plots.retained),
    "sensitivity": ("sensitivity", plots.sensitivity),
    "sla": ("sla", plots.sla),
    "steps": ("steps", plots.steps),
    "waste": ("waste", plots.waste),
}
ON_CPU = {"quality"}


def result_of(name: str, results: Path = RESULTS, machine: str = "h200") -> Path:
    """The figure's result file, which need not exist."""
    benchmark, _ = FIGURES[name]
    return results / f"{benchmark}-{'cpu' if benchmark in ON_CPU else machine}.json"


def draw(name: str, result: Result, out: Path) -> Path:
    """The same bytes for the same result."""
    plt.rcParams["svg.hashsalt"] = name
    figure, axes = plt.subplots(figsize=(7, 4))
    FIGURES[name][1](axes, result)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.svg"
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--machine", default="h200")
    arguments = parser.parse_args()
    for name in FIGURES:
        path = result_of(name, arguments.results, arguments.machine)
        if path.exists():
            print(draw(name, json.loads(path.read_text()), arguments.out))


if __name__ == "__main__":
    main()
