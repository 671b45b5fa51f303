# SPDX-License-Identifier: Apache-2.0
"""ROUGE-L of answers against the answers of full attention, and what the substrate adds.

144 prompts of real text, 256 tokens each, greedy. ``policy``: transformers with the mask that the
audit trail of the engine's run tells, that is the same evictions without any of our memory.
``vtoken``: the engine. The gap between the two against the answers of full attention is what the
substrate costs (``substrate_rougel_gap_POLICY``: the largest over all ratios). Lin, "ROUGE: A
Package for Automatic Evaluation of Summaries", 2004, section 3.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.command import short
from benchmarks.quality.engine import QualityEngine
from benchmarks.quality.exact import Eviction, ExactModel
from benchmarks.quality.texts import passages
from benchmarks.results import once

PROMPTS, PROMPT_TOKENS, TOKENS = 144, 256, 256
NEAR = 0.01


def run(
    model: Path, policies: Sequence[str], ratios: Sequence[float], count: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(summary, rows)."""
    prompts = passages(model, min(count, PROMPTS), PROMPT_TOKENS)
    engine, exact = QualityEngine(model, num_seqs=16), ExactModel(model)
    full = _answers(engine, prompts, Eviction("keep_all", 1.0))
    references = [list(output.outputs[0].token_ids) for output in full]
    rows = []
    for ratio in ratios:
        for policy in policies:
            outputs = _answers(engine, prompts, Eviction(policy, ratio))
            with ThreadPoolExecutor(2) as pool:
                replays = list(pool.map(lambda output: replay(exact, output), outputs))
            for number, (output, replayed) in enumerate(zip(outputs, replays, strict=True)):
                ours = rouge_l(list(output.outputs[0].token_ids), references[number])
                own = rouge_l(replayed, references[number])
                key = {"policy": policy, "keep_ratio": ratio, "prompt": number}
                rows.append(key | {"vtoken": ours, "exact": own, "gap": ours - own})
            print(short(rows[-1]), flush=True)
    return _summary(rows), rows


def _answers(engine: QualityEngine, prompts: list[list[int]], eviction: Eviction) -> list[Any]:
    return engine.generate(prompts, eviction, max_tokens=TOKENS, ignore_eos=True)


def replay(exact: ExactModel, output: Any) -> list[int]:
    """The greedy answer under the mask of a run's audit trail.

    Teacher forced with the run's own answer: as long as it is the greedy choice at every place,
    free running would give the same. From the first place on where it is not, run freely.
    """
    prompt, tokens = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    while True:
        chosen = _choices(exact, prompt + tokens, len(tokens), output.audit)
        wrong = next((i for i, token in enumerate(tokens) if chosen[i] != token), None)
        if wrong is None:
            return tokens
        tokens[wrong:] = chosen[wrong:]  # right up to and including this place


def _choices(
    exact: ExactModel, text: list[int], count: int, audit: Sequence[dict[str, Any]]
) -> list[int]:
    """The likeliest token at each of the last ``count`` places of a text."""
    fed = len(text) - 1
    index, unseen_from = torch.arange(fed), torch.full((fed,), fed)
    for row in audit:
        if row["event"] == "reclaim":
            unseen_from[torch.from_numpy(row["positions"].astype(np.int64))] = row["first_query"]
    visible = (index[None, :] <= index[:, None]) & (index[:, None] < unseen_from[None, :])
    bias = torch.zeros(fed, fed).masked_fill(~visible, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        logits = exact.model(
            input_ids=torch.tensor(text[:-1])[None],
            attention_mask=bias[None, None],
            use_cache=False,
            logits_to_keep=count,
        ).logits
    chosen: list[int] = logits[0].argmax(-1).tolist()
    return chosen


def rouge_l(answer: Sequence[int], reference: Sequence[int]) -> float:
    """F1 of the longest common subsequence of two token sequences."""
    lengths = np.zeros(len(reference) + 1, np.int64)
    columns = np.array(reference)
    for token in answer:
        matched = np.where(columns == token, lengths[:-1] + 1, lengths[1:])
        lengths[1:] = np.maximum.accumulate(np.maximum(matched, lengths[1:]))
    return 2 * float(lengths[-1]) / (len(answer) + len(reference))


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    summary = {}
    gaps_of: dict[str, list[float]] = {}
    for policy, ratio in dict.fromkeys((r["policy"], r["keep_ratio"]) for r in rows):
        own = [r for r in rows if (r["policy"], r["keep_ratio"]) == (policy, ratio)]
        percent, gaps = round(100 * ratio), [r["gap"] for r in own]
        key = f"{policy}_{percent}"
        near = sum(abs(gap) <= NEAR for gap in gaps) / len(gaps)
        summary[f"rougel_policy_{key}"] = once(round(float(np.mean([r["exact"] for r in own])), 4))
        summary[f"rougel_vtoken_{key}"] = once(round(float(np.mean([r["vtoken"] for r in own])), 4))
        summary[f"substrate_rougel_gap_{key}"] = once(round(float(np.mean(gaps)), 5))
        summary[f"substrate_rougel_near_{key}"] = once(round(near, 4))
        gaps_of.setdefault(policy, []).append(float(np.mean(gaps)))
    for policy, found in gaps_of.items():
        largest = max(found, key=abs)
        summary[f"substrate_rougel_gap_{policy}"] = once(round(largest, 5))
    return summary
