# SPDX-License-Identifier: Apache-2.0
"""What each figure shows: a function of the axes and of one result file's content."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from matplotlib.axes import Axes

from benchmarks.kernels import is_copy

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
    """One bar per kernel, copies above all else."""
    for row in result["rows"]:
        copies = is_copy(row)
        colour = "#d98c3f" if copies else "#2a6fbb"
        axes.barh(int(copies), row["length_us"], left=row["start_us"], height=0.6, color=colour)
    axes.set_yticks([0, 1], ["forward", "copies"])
    axes.set_xlabel("microseconds from the beginning of the copy")


def contention(axes: Axes, result: Result) -> None:
    found = defaultdict(list)
    for row in result["rows"]:
        found[row["crowded"], row["arm"]].append(row["tokens_per_s"])
    entries = [
        (f"{arm},\n{'beside another process' if crowded else 'alone'}", around(speed), COLOURS[arm])
        for (crowded, arm), speed in sorted(found.items())
    ]
    bars(axes, entries)
    axes.set_ylabel("tokens per second")


def peer(axes: Axes, result: Result) -> None:
    found = defaultdict(list)
    for row in result["rows"]:
        found[row["arm"]].append(row["tokens_per_s"])
    bars(axes, [(arm, around(speed), COLOURS[arm]) for arm, speed in sorted(found.items())])
    axes.set_ylabel("tokens per second")
    axes.set_title("256 requests of 700 + 1,024 tokens through 10,800 blocks")


def quality(axes: Axes, result: Result) -> None:
    """Perplexity by share kept: exact eviction, and what vToken makes of it dashed."""
    summary = result["summary"]
    policies = sorted(key.partition("_ppl_exact_")[0] for key in summary if "_ppl_exact_50" in key)
    for number, policy in enumerate(policies):
        for how, style in (("exact", "-"), ("vtoken", "--")):
            keys = [(kept, f"{policy}_ppl_{how}_{kept}") for kept in (75, 50, 25)]
            points = [(kept, summary[key]["median"]) for kept, key in keys if key in summary]
            label = policy if how == "exact" else None
            axes.plot(*zip(*points, strict=True), style, color=f"C{number}", label=label)
    axes.set_xticks([75, 50, 25])
    axes.invert_xaxis()
    axes.set_xlabel("share of the tokens kept, %")
    axes.set_ylabel("perplexity")
    axes.legend()


def steps(axes: Axes, result: Result) -> None:
    """A decoding step by kind of kernel; what is missing to its whole time is idle."""
    groups = defaultdict(list)
    for row in result["rows"]:
        groups[row["concurrency"], row["arm"]].append(row)
    order = sorted(groups)
    labels = [f"{arm.replace(', ', chr(10))}\n{count}" for count, arm in order]
    bottom = [0.0] * len(order)
    for kind in sorted({kind for row in result["rows"] for kind in row["busy_us"]}):
        heights = [median(r["busy_us"].get(kind, 0) / 1e3 for r in groups[one]) for one in order]
        axes.bar(labels, heights, bottom=bottom, label=kind)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    whole = [median(row["step_ms"] for row in groups[one]) for one in order]
    axes.plot(labels, whole, "k_", markersize=18, label="a step")
    axes.set_ylim(top=1.3 * max(whole))  # room for the legend
    axes.tick_params(axis="x", labelsize=6)
    axes.set_ylabel("milliseconds")
    axes.legend(loc="upper left", ncols=3)


def around(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


def sensitivity(axes: Axes, result: Result) -> None:
    """Memory and speed by theta_f; the dotted lines are ``adaptive``, which has none."""
    found = defaultdict(list)
    for row in result["rows"]:
        if (row["arm"], row["keep_ratio"]) == ("blocks of 16", 0.5):
            found[row["theta_f"]].append(row)
    thetas = sorted(theta for theta in found if theta >= 0)
    for side, key, colour in (
        (axes, "blocks_over_ideal", "C0"),
        (axes.twinx(), "tokens_per_s", "C1"),
    ):
        middle = {theta: median(row[key] for row in rows) for theta, rows in found.items()}
        side.plot(thetas, [middle[theta] for theta in thetas], "o-", color=colour)
        for theta in middle.keys() - thetas:
            side.axhline(middle[theta], color=colour, linestyle=":")
        side.set_ylabel(key.replace("_", " "), color=colour)
    axes.set_xlabel("theta_f")


def prefix(axes: Axes, result: Result) -> None:
    found = defaultdict(list)
    for row in result["rows"]:
        found[row["arm"], row["group"]].append(row["blocks_used"])
    for arm in dict.fromkeys(arm for arm, _ in found):
        line = sorted((group, median(used)) for (who, group), used in found.items() if who == arm)
        axes.plot(*zip(*line, strict=True), "o-", color=COLOURS[arm], label=arm)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests that share 8,192 of their 16,384 tokens")
    axes.set_ylabel("blocks in use")
    axes.legend()
