# SPDX-License-Identifier: Apache-2.0
"""Which tokens our policies keep, against kvpress's scores for the same texts.

    python -m benchmarks.quality.agreement texts TEXTS.json
    python -m benchmarks.quality.agreement compare SCORES.parquet

kvpress (arXiv 2510.00636) lets each head keep its own tokens. We keep one set for all, so its
scores are reduced as our probe reduces ours: mean over heads and probed layers. The same tokens
are protected on both sides, and half of the text is kept. ``make kvpress`` runs all of it.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from benchmarks.command import publish
from benchmarks.quality.engine import QualityEngine
from benchmarks.quality.exact import Eviction
from benchmarks.quality.texts import passages
from benchmarks.results import Part, spread
from worker.model import default_model

TEXTS, TOKENS, RATIO = 8, 512, 0.5
POLICIES = ("key_norm", "key_diff", "snapkv", "tova", "streaming_llm")
SINKS, RECENT = 4, 32

Scores = npt.NDArray[np.float64]


def kept_by(scores: Scores) -> set[int]:
    """The best-scored half of a text's tokens, the protected ones among them."""
    ranked = scores.copy()
    ranked[:SINKS] = ranked[ranked.size - RECENT :] = np.inf
    count = int(np.ceil(ranked.size * RATIO))
    order = np.argsort(-ranked, kind="stable")
    return set(order[:count].tolist())


def kept_by_engine(engine: QualityEngine, text: list[int], policy: str) -> set[int]:
    """What is left after the policy's first run, which has seen the whole text and no more."""
    eviction = Eviction(policy, RATIO, sinks=SINKS, recent=RECENT)
    (output,) = engine.generate([text], eviction, max_tokens=8, ignore_eos=True)
    first = next(row for row in output.audit if row["event"] == "evict")
    return set(range(len(text))) - set(first["positions"].tolist())


def overlap(ours: set[int], theirs: set[int]) -> float:
    return len(ours & theirs) / len(theirs)


def compare(path: Path) -> None:
    table = pq.read_table(path)
    texts = passages(default_model(), TEXTS, TOKENS)
    engine = QualityEngine(default_model(), num_seqs=1, chunk=TOKENS)
    layers = engine.probed_layers()
    rows: list[dict[str, Any]] = []
    for policy in POLICIES:
        for number, text in enumerate(texts):
            ours = kept_by_engine(engine, text, policy)
            scores = [
                (row["layer"], np.array(row["scores"]))
                for row in table.to_pylist()
                if (row["press"], row["text"]) == (policy, number)
            ]
            reduced = np.mean([values for layer, values in scores if layer in layers], axis=0)
            heads = [overlap(ours, kept_by(values)) for _, values in scores]
            rows.append(
                {
                    "policy": policy,
                    "text": number,
                    "agreement": overlap(ours, kept_by(reduced)),
                    "per_head": float(np.mean(heads)),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    summary = {}
    for policy in POLICIES:
        own = [row for row in rows if row["policy"] == policy]
        summary[f"kvpress_agreement_{policy}"] = spread([row["agreement"] for row in own])
        summary[f"kvpress_per_head_{policy}"] = spread([row["per_head"] for row in own])
    made_with = {k.decode(): v.decode() for k, v in table.schema.metadata.items()}
    config = {"texts": TEXTS, "tokens": TOKENS, "kept": RATIO, "scores": made_with}
    publish("quality", Part(config, summary, rows, "kvpress"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("texts", "compare"))
    parser.add_argument("path", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "texts":
        texts = passages(default_model(), TEXTS, TOKENS)
        arguments.path.write_text(json.dumps(texts))
    else:
        compare(arguments.path)


if __name__ == "__main__":
    main()
