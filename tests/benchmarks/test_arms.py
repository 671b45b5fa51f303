# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' own working: real engines side by side, and a load that ends."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.arms import Arm, by_turns, side_by_side
from benchmarks.capacity import feasible, run_load, summary_of_2048
from benchmarks.engine import Load
from benchmarks.results import Part, once, spread, write_result

ARGUMENTS = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "num_gpu_blocks_override": 25,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 2**26,
}
OPTIONS = {"policy": "random", "budget_tokens": 64, "evict_after_tokens": 0}


@pytest.mark.engine
def test_two_engines_take_turns_and_only_one_gives_memory_back() -> None:
    arms = [Arm("stock", None, "tiny", ARGUMENTS), Arm("vtoken", OPTIONS, "tiny", ARGUMENTS)]
    with side_by_side(arms) as processes:
        rows = {
            name: arm.call(run_load, Load(6, 128, 96, concurrency=4))
            for name, arm in processes.items()
        }
        fit = {name: arm.call(feasible, Load(5, 128, 96)) for name, arm in processes.items()}
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            processes["vtoken"].call(divide, 0)
    for row in rows.values():
        assert row["finished"] == 6 and row["max_running"] <= 4
        assert row["latency_p95_s"] >= row["latency_p50_s"] > 0 and row["tokens_per_s"] > 0
    assert "blocks_given_back" not in rows["stock"] and rows["vtoken"]["blocks_given_back"] > 0
    assert fit["vtoken"]["feasible"] and not fit["stock"]["feasible"], fit


def divide(engine: Any, by: int) -> float:
    return 1 / by


def test_every_arm_has_its_turn_first() -> None:
    turns = list(by_turns(["a", "b"], 3))
    assert turns == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_ratios_are_taken_within_a_round() -> None:
    speeds = {"vtoken": [10.0, 30.0, 40.0], "stock": [5.0, 10.0, 10.0]}
    rows = [
        {"round": i, "arm": arm, "tokens_per_s": value, "preemptions": 0}
        for arm, values in speeds.items()
        for i, value in enumerate(values)
    ]
    summary = summary_of_2048(rows)
    assert summary["speedup_vs_stock_2048"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert "speedup_vs_naive_2048" not in summary


def test_a_part_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", 2), ("a", 3)):
        part = Part({"n": value}, {f"key_{name}": once(value)}, [{"value": value}], name)
        path = write_result("trial", part, tmp_path)
    content = json.loads(path.read_text())
    assert (
        content["summary"]["key_a"]["median"] == 3 and content["summary"]["key_b"]["repeats"] == 1
    )
    assert sorted((row["part"], row["value"]) for row in content["rows"]) == [("a", 3), ("b", 2)]
    assert set(content["parts"]) == {"a", "b"} and content["parts"]["b"]["commit"]


def test_two_repeats_are_no_spread() -> None:
    with pytest.raises(ValueError, match="at least 3"):
        spread([1, 2])
