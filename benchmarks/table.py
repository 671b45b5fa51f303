# SPDX-License-Identifier: Apache-2.0
"""The README's table, from the result files. A test keeps the two equal.

python -m benchmarks.table
"""

import json

from benchmarks.results import RESULTS

MACHINE = "h200"
# What it says, benchmark, summary key, decimals. What is not measured yet is left out.
LINES = [
    ("throughput against stock vLLM", "capacity", "speedup_vs_stock_2048", 2),
    ("throughput against naive eviction", "capacity", "speedup_vs_naive_2048", 2),
    (
        "throughput, as a share of stock vLLM's with memory for everything",
        "capacity",
        "fraction_of_unlimited_2048",
        2,
    ),
    ("preemptions", "capacity", "preemptions_vtoken_2048", 0),
    *(
        (
            f"requests of 4,320 + 12,000 tokens at once in {blocks:,} blocks, half kept: {who}",
            "capacity",
            f"max_concurrency_{arm}_{blocks}",
            0,
        )
        for blocks in (5427, 11519)
        for who, arm in (("stock vLLM", "stock"), ("vToken", "vtoken"))
    ),
    (
        "requests of 12,288 + 4,096, half kept: throughput against naive eviction at its p95",
        "sla",
        "sla_speedup_random",
        2,
    ),
    *(
        (
            f"half kept by `{policy}`: share of naive eviction's blocks that vToken does without",
            "retained",
            key,
            2,
        )
        for policy, key in (
            ("random", "reduction_vs_naive_random"),
            ("h2o", "h2o_reduction_vs_naive"),
            ("scissorhands", "scissorhands_reduction_vs_naive"),
        )
    ),
    (
        "R-KV's shape (256 requests of 700 + 1,024, 10,800 blocks): throughput against stock vLLM",
        "peer",
        "peer_speedup_vs_stock",
        2,
    ),
    (
        "memory for everything, `eager`: throughput against stock vLLM",
        "overhead",
        "ample_memory_ratio",
        2,
    ),
    (
        "memory for everything, `pressure`: throughput against stock vLLM",
        "overhead",
        "ample_memory_ratio_pressure",
        3,
    ),
    *(
        (
            f"nothing evicted, {requests} requests at a time: throughput against stock vLLM",
            "overhead",
            f"throughput_ratio_hooks_only_c{requests}",
            3,
        )
        for requests in (16, 48, 256)
    ),
    (
        "`h2o` measures, nothing reclaimed, 48 requests at a time: throughput against stock vLLM",
        "overhead",
        "probe_throughput_ratio_c48",
        3,
    ),
    (
        "bandwidth of the copies, as a share of a plain copy's",
        "overhead",
        "copy_bandwidth_fraction",
        2,
    ),
    (
        "wait of a forward for a copy, 99th percentile, microseconds",
        "overhead",
        "commit_stall_us_p99",
        0,
    ),
]


def table() -> str:
    lines = ["| | median | range |", "|---|---|---|"]
    for label, benchmark, key, decimals in LINES:
        path = RESULTS / f"{benchmark}-{MACHINE}.json"
        summary = json.loads(path.read_text())["summary"] if path.exists() else {}
        if key in summary:
            low, middle, high = (
                f"{summary[key][k]:.{decimals}f}" for k in ("min", "median", "max")
            )
            lines.append(f"| {label} | {middle} | {low} to {high} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
