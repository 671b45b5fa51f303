# SPDX-License-Identifier: Apache-2.0
"""What eviction costs in quality, on a real model and real text.

    python -m benchmarks.quality perplexity [--policies h2o,random] [--ratios 0.5] [--count 8]
    python -m benchmarks.quality rouge      [...] [--count 144]
    python -m benchmarks.quality recall     [...] [--count 16] [--lengths 256 512 1024 2048]

Two losses are told apart: the policy's own, computed exactly in transformers, and what probe,
blocks and delay add to it. The model is SmolLM2-135M-Instruct unless --model names a folder or a
model id in Hugging Face's format.
"""

import argparse
from pathlib import Path

from benchmarks.command import publish
from benchmarks.quality import perplexity, recall, rouge
from benchmarks.results import Part
from vtoken.policies import POLICIES
from worker.model import default_model

PARTS = {
    "perplexity": (perplexity.run, 8),
    "rouge": (rouge.run, 144),
    "recall": (recall.run, 16),
}
EVICTING = [name for name in POLICIES if name != "keep_all"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--policies", default=",".join(EVICTING), help="separated by commas")
    parser.add_argument("--ratios", default="0.75,0.5,0.25", help="shares kept")
    parser.add_argument("--count", type=int, help="texts, prompts or chats")
    parser.add_argument("--lengths", type=int, nargs="*", default=recall.LENGTHS, help="of recall")
    parser.add_argument("--model", help="folder or id; default SmolLM2-135M-Instruct")
    arguments = parser.parse_args()
    run, count = PARTS[arguments.part]
    model = Path(arguments.model) if arguments.model else default_model()
    policies = arguments.policies.split(",")
    ratios = [float(ratio) for ratio in arguments.ratios.split(",")]
    count = arguments.count or count
    config = {"policies": policies, "ratios": ratios, "count": count}
    if arguments.part == "recall":
        config["lengths"] = arguments.lengths
    summary, rows = run(model, **config)
    config["model"] = model.name
    parts = [arguments.part, *map(str, config.get("lengths", ())), *policies]
    name = "-".join([*parts, *(f"{100 * ratio:g}" for ratio in ratios)])
    publish("quality", Part(config, summary, rows, name))


if __name__ == "__main__":
    main()
