# SPDX-License-Identifier: Apache-2.0
"""Draw every figure from the result files alone.

python -m benchmarks.figures [--results benchmarks/results] [--out docs/figures]
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.results import RESULTS

OUT = RESULTS.parents[1] / "docs" / "figures"
COLOURS = {"stock": "#7f7f7f", "naive": "#d98c3f", "vtoken": "#2a6fbb", "unlimited": "#b5b5b5"}
Result = Mapping[str, Any]


def bars(axes: Axes, entries: Sequence[tuple[str, Mapping[str, float], str]]) -> None:
    """(label, summary entry, colour): the median, and a line from min to max."""
    for x, (_, entry, colour) in enumerate(entries):
        low, high = entry["median"] - entry["min"], entry["max"] - entry["median"]
        axes.bar(x, entry["median"], color=colour, yerr=[[low], [high]], capsize=4)
    axes.set_xticks(range(len(entries)), [label for label, _, _ in entries])


def capacity(axes: Axes, result: Result) -> None:
    summary = result["summary"]
    keys = [(arm, f"tokens_per_s_{arm}_2048") for arm in COLOURS]
    bars(axes, [(arm, summary[key], COLOURS[arm]) for arm, key in keys if key in summary])
    axes.set_ylabel("tokens per second")
    axes.set_title("256 requests through 2,048 blocks")


def overhead(axes: Axes, result: Result) -> None:
    found = {k: v for k, v in result["summary"].items() if "ratio" in k or "fraction" in k}
    for y, entry in enumerate(found.values()):
        axes.plot([entry["min"], entry["max"]], [y, y], color="#2a6fbb")
        axes.plot(entry["median"], y, "o", color="#2a6fbb")
    axes.set_yticks(range(len(found)), list(found))
    axes.axvline(1, color="#7f7f7f", linewidth=0.8)
    axes.set_title("ratios to stock vLLM, or to a plain copy")


def retained(axes: Axes, result: Result) -> None:
    summary, entries = result["summary"], []
    for policy in ("random", "streaming_llm"):
        for arm in ("naive", "vtoken"):
            entries.append((f"{policy}\n{arm}", summary[f"F_{arm}_{policy}"], COLOURS[arm]))
    bars(axes, entries)
    axes.set_ylabel("F, memory held without a live token")


def waste(axes: Axes, result: Result) -> None:
    rows = [row for row in result["rows"] if row["round"] == 0]
    for arm, policy in sorted({(row["arm"], row["policy"]) for row in rows}):
        line = [row for row in rows if (row["arm"], row["policy"]) == (arm, policy)]
        style = {"random": "-", "streaming_llm": "--", "keep_all": ":"}[policy]
        lengths, values = [r["length"] for r in line], [r["F"] for r in line]
        axes.plot(lengths, values, style, color=COLOURS[arm], label=f"{arm}, {policy}")
    axes.set_xlabel("tokens of each request")
    axes.set_ylabel("F")
    axes.set_ylim(top=0.75)  # room for the legend
    axes.legend(loc="upper left", ncols=2)


def sla(axes: Axes, result: Result) -> None:
    """What meets the target; a run that misses it is not carried to its end."""
    first = [row for row in result["rows"] if row["part"] == "random" and row["round"] == 0]
    for arm in ("naive", "vtoken"):
        line = sorted(
            (row["concurrency"], row["latency_p95_s"], row["tokens_per_s"])
            for row in first
            if row["arm"] == arm and row["meets"]
        )
        x, y = [p95 for _, p95, _ in line], [speed for _, _, speed in line]
        axes.plot(x, y, "o-", color=COLOURS[arm], label=arm)
        for concurrency, p95, speed in line:
            axes.annotate(str(concurrency), (p95, speed))
    axes.axvline(first[0]["target"], color="#7f7f7f", linewidth=0.8)
    axes.set_xlabel("p95 request latency, s")
    axes.set_ylabel("tokens per second")
    axes.legend()


def profile(axes: Axes, result: Result) -> None:
    """One bar per kernel, the copies' stream above the main stream."""
    rows = result["rows"]
    (copying,) = {row["stream"] for row in rows if "_copy_tokens" in row["name"]}
    for row in rows:
        above = row["stream"] == copying
        colour = "#d98c3f" if "_copy_tokens" in row["name"] else "#2a6fbb"
        axes.barh(int(above), row["length_us"], left=row["start_us"], height=0.6, color=colour)
    axes.set_yticks([0, 1], ["main stream", "migration stream"])
    axes.set_xlabel("microseconds from the beginning of the copy")


FIGURES: dict[str, Callable[[Axes, Result], None]] = {
    "capacity": capacity,
    "overhead": overhead,
    "retained": retained,
    "waste": waste,
    "sla": sla,
    "profile": profile,
}


def draw(name: str, result: Result, out: Path) -> Path:
    """The same bytes for the same result."""
    plt.rcParams["svg.hashsalt"] = name
    figure, axes = plt.subplots(figsize=(7, 4))
    FIGURES[name](axes, result)
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
        path = arguments.results / f"{name}-{arguments.machine}.json"
        if path.exists():
            print(draw(name, json.loads(path.read_text()), arguments.out))


if __name__ == "__main__":
    main()
