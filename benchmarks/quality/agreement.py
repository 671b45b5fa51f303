# SPDX-License-Identifier: Apache-2.0
"""Which tokens our policies keep, against kvpress's scores for the same texts.

    python -m benchmarks.quality.agreement texts TEXTS.json
    python -m benchmarks.quality.agreement compare SCORES.parquet
    python -m benchmarks.quality.agreement extract SCORES.parquet TEXTS.json OUT.json

kvpress (arXiv 2510.00636) lets each head keep its own tokens. We keep one set for all, so its
scores are reduced as our probe reduces ours: mean over heads and probed layers. The same tokens
are protected on both sides, and half of the text is kept. ``make kvpress`` runs all of it.
``extract`` makes the fixture of tests/engine: ``texts --count 1 --tokens 128`` before it.
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
from vtoken.options import ReplicaOptions
from worker.model import default_model
from worker.probed_layers import spread as spread_layers

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


def extract(scores: Path, texts: Path, out: Path) -> None:
    """The scores of the first text in the layers that a probe looks at, and where they are from."""
    table = pq.read_table(scores)
    found: dict[str, dict[int, list[list[float]]]] = {}
    rows = [row for row in table.to_pylist() if row["text"] == 0]
    chosen = spread_layers(1 + max(row["layer"] for row in rows), ReplicaOptions().probe_layers)
    for row in rows:
        if row["layer"] in chosen:
            heads = found.setdefault(row["press"], {}).setdefault(row["layer"], [])
            heads.append([float(f"{score:.5g}") for score in row["scores"]])
    content = {
        "provenance": {
            "scores": "scripts/kvpress_scores.py",
            "made_with": {k.decode(): v.decode() for k, v in table.schema.metadata.items()},
            "model": "SmolLM2-135M-Instruct, float32 (worker/model.py)",
            "text": "the first tokens of the Python manual's topics, sorted and joined",
            "layers": "those that a probe of 4 layers looks at",
            "content": "press -> layer -> KV head -> score of each token",
        },
        "tokens": json.loads(texts.read_text())[0],
        "scores": found,
    }
    out.write_text(json.dumps(content, separators=(",", ":")) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("texts", "compare", "extract"))
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--count", type=int, default=TEXTS, help="of texts")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each text")
    arguments = parser.parse_args()
    if arguments.what == "texts":
        texts = passages(default_model(), arguments.count, arguments.tokens)
        arguments.paths[0].write_text(json.dumps(texts))
    elif arguments.what == "extract":
        extract(*arguments.paths)
    else:
        compare(*arguments.paths)


if __name__ == "__main__":
    main()
