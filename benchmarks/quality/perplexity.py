# SPDX-License-Identifier: Apache-2.0
"""Perplexity of real text when a share of it is kept.

8 windows of 4,096 tokens, the last 2,048 of each scored, in chunks of 128. ``full`` is transformers
with everything visible, ``exact`` transformers with the policy's mask, ``vtoken`` the engine.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import short
from benchmarks.quality.engine import CHUNK, QualityEngine
from benchmarks.quality.exact import Eviction, ExactModel
from benchmarks.quality.texts import windows
from benchmarks.results import once

SIZE, SCORED = 4096, 2048
FULL = Eviction("keep_all", 1.0)


def run(
    model: Path, policies: Sequence[str], ratios: Sequence[float], count: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(summary, rows)."""
    texts = windows(model, count, SIZE)
    wanted = [Eviction(policy, ratio) for ratio in ratios for policy in policies]
    rows = []
    for row in _measure(model, texts, wanted):
        rows.append(row)
        print(short(row), flush=True)
    return _summary(rows, policies, ratios), rows


def _measure(
    model: Path, texts: list[list[int]], wanted: list[Eviction]
) -> Iterator[dict[str, Any]]:
    exact = ExactModel(model)
    for eviction in [FULL, *wanted]:
        arm = "full" if eviction is FULL else "exact"
        for number, text in enumerate(texts):
            found = exact.logprobs(text, eviction, CHUNK)
            yield _row(arm, eviction, number, found)
    del exact
    engine = QualityEngine(model, num_seqs=1)
    for eviction in [FULL, *wanted]:
        for number, text in enumerate(texts):
            (output,) = engine.generate([text], eviction, max_tokens=1, prompt_logprobs=0)
            entries = output.prompt_logprobs[1:]
            chosen = [entry[token].logprob for entry, token in zip(entries, text[1:], strict=True)]
            row = _row("vtoken", eviction, number, np.array(chosen))
            gone = sum(len(r["positions"]) for r in output.audit if r["event"] == "reclaim")
            yield row | {"reclaimed": gone}


def _row(arm: str, eviction: Eviction, number: int, logprobs: Any) -> dict[str, Any]:
    return {
        "arm": arm,
        "policy": eviction.policy,
        "keep_ratio": eviction.keep_ratio,
        "window": number,
        "nll": float(-logprobs[-SCORED:].mean()),
    }


def _summary(
    rows: list[dict[str, Any]], policies: Sequence[str], ratios: Sequence[float]
) -> dict[str, Any]:
    """Perplexities over all windows, and what is compared. Greedy and fixed: one value each."""

    def perplexity(arm: str, policy: str, ratio: float) -> float:
        key = arm, policy, ratio
        values = [r["nll"] for r in rows if (r["arm"], r["policy"], r["keep_ratio"]) == key]
        return float(np.exp(np.mean(values)))

    full = perplexity("full", "keep_all", 1.0)
    summary = {"ppl_full": once(round(full, 4))}
    summary["ppl_vtoken_keep_all"] = once(round(perplexity("vtoken", "keep_all", 1.0), 4))
    for ratio in ratios:
        percent = round(100 * ratio)
        by_random = perplexity("vtoken", "random", ratio) - full if "random" in policies else 0
        for policy in policies:
            exact, ours = (perplexity(arm, policy, ratio) for arm in ("exact", "vtoken"))
            summary[f"{policy}_ppl_exact_{percent}"] = once(round(exact, 4))
            summary[f"{policy}_ppl_vtoken_{percent}"] = once(round(ours, 4))
            summary[f"{policy}_ppl_ratio_{percent}"] = once(round(ours / exact, 4))
            if by_random and policy != "random":
                gain = (ours - full) / by_random
                summary[f"{policy}_ppl_gain_vs_random_{percent}"] = once(round(gain, 4))
    return summary
