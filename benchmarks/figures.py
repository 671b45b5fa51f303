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


def concurrency(axes: Axes, result: Result) -> None:
    """The paper's Figures 9 and 10."""
    keys = [
        (f"{blocks:,}" * (arm == "naive"), f"max_concurrency_{arm}_{blocks}", COLOURS[arm])
        for blocks in (1357, 2880, 5427, 11519)
        for arm in ("stock", "naive", "vtoken")
    ]
    summary = result["summary"]
    bars(axes, [(label, summary[key], colour) for label, key, colour in keys if key in summary])
    axes.set_xlabel("blocks of the pool: stock vLLM, naive eviction, vToken")
    axes.set_ylabel("requests at once")


def retained(axes: Axes, result: Result) -> None:
    """The paper's Figure 7: blocks of each request."""
    styles = {"random": "-", "h2o": "--", "scissorhands": ":"}
    for row in result["rows"]:
        style = styles.get(row["policy"])
        if row["round"] or style is None:
            continue
        lengths = [request["length"] for request in row["requests"]]
        for key, arm in (("blocks", row["arm"]), ("ideal", "ideal")):
            if (key, row["arm"]) == ("ideal", "naive"):
                continue  # the same tokens are live in both arms, but for chance
            values = [request[key] for request in row["requests"]]
            label = f"{arm}, {row['policy']}"
            axes.plot(lengths, values, style, color=COLOURS.get(arm, "black"), label=label)
    axes.set_xlabel("tokens of a request")
    axes.set_ylabel("blocks")
    axes.set_ylim(top=650)  # room for the legend
    axes.legend(loc="upper left", ncols=3, fontsize=7)


def waste(axes: Axes, result: Result, key: str = "F") -> None:
    rows = [row for row in result["rows"] if row["round"] == 0]
    for arm, policy in sorted({(row["arm"], row["policy"]) for row in rows}):
        line = [row for row in rows if (row["arm"], row["policy"]) == (arm, policy)]
        style = {"random": "-", "streaming_llm": "--", "keep_all": ":"}[policy]
        lengths, values = [r["length"] for r in line], [r[key] for r in line]
        axes.plot(lengths, values, style, color=COLOURS[arm], label=f"{arm}, {policy}")
    axes.set_xlabel("tokens of each request")
    axes.set_ylabel("F" if key == "F" else "share of blocks at most half full")
    axes.set_ylim(top=0.9)  # room for the legend
    axes.legend(loc="upper left", ncols=2)


def half_empty(axes: Axes, result: Result) -> None:
    waste(axes, result, "half_empty")


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


# Name of the figure -> its benchmark, and what draws it.
FIGURES: dict[str, tuple[str, Callable[[Axes, Result], None]]] = {
    "capacity": ("capacity", capacity),
    "concurrency": ("capacity", concurrency),
    "overhead": ("overhead", overhead),
    "retained": ("retained", retained),
    "waste": ("waste", waste),
    "half_empty": ("waste", half_empty),
    "sla": ("sla", sla),
    "profile": ("profile", profile),
}


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
    for name, (benchmark, _) in FIGURES.items():
        path = arguments.results / f"{benchmark}-{arguments.machine}.json"
        if path.exists():
            print(draw(name, json.loads(path.read_text()), arguments.out))


if __name__ == "__main__":
    main()
