# SPDX-License-Identifier: Apache-2.0
"""Scores of kvpress's presses for fixed texts, layer by layer and head by head, as Parquet.

Runs in an environment of its own, since kvpress wants another transformers: ``make kvpress``.

    python scripts/kvpress_scores.py MODEL_FOLDER TEXTS.json OUT.parquet

TEXTS.json holds a list of lists of token ids. Nothing of this project is imported.
"""

import json
import sys
from importlib.metadata import version
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from kvpress import KeyDiffPress, KnormPress, SnapKVPress, StreamingLLMPress, TOVAPress
from transformers import AutoModelForCausalLM

RATIO = 0.5
PRESSES = {
    "key_norm": KnormPress(RATIO),
    "key_diff": KeyDiffPress(RATIO),
    "snapkv": SnapKVPress(RATIO, window_size=32, kernel_size=5),
    "tova": TOVAPress(RATIO),
    "streaming_llm": StreamingLLMPress(RATIO, n_sink=4),
}


def scores_of(model: Any, press: Any, tokens: list[int]) -> list[torch.Tensor]:
    """float32 ``[kv heads, tokens]`` for each layer, as the press scored them."""
    found = []
    original = type(press).score

    def score(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        scores = original(self, *args, **kwargs)
        found.append(scores[0].float())
        return scores

    type(press).score = score
    try:
        with torch.inference_mode(), press(model):
            model(torch.tensor(tokens)[None])
    finally:
        type(press).score = original
    return found


def main() -> None:
    folder, texts, out = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    with open(texts) as file:
        for number, tokens in enumerate(json.load(file)):
            for name, press in PRESSES.items():
                for layer, scores in enumerate(scores_of(model, press, tokens)):
                    for head, values in enumerate(scores.tolist()):
                        key = {"text": number, "press": name, "layer": layer, "head": head}
                        rows.append(key | {"scores": values})
    schema = pa.schema(
        [
            ("text", pa.int32()),
            ("press", pa.string()),
            ("layer", pa.int32()),
            ("head", pa.int32()),
            ("scores", pa.list_(pa.float32())),
        ],
        metadata={name: version(name) for name in ("kvpress", "transformers", "torch")},
    )
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), out)
    print(f"{len(rows)} rows of scores: {out}")


if __name__ == "__main__":
    main()
