# SPDX-License-Identifier: Apache-2.0
"""Needles in a haystack, in the words of the question and in others, and second questions.

A sentence with a number is put into real text; a chat asks for the number. ``plain`` asks in the
words of the sentence, ``paraphrased`` in other ones. ``second``: two needles, the first is asked
for and answered, then the second one in the next turn of the chat. Only lengths at which full
attention finds 80 % or more say anything, so only those count.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import short
from benchmarks.quality.engine import QualityEngine
from benchmarks.quality.exact import Eviction
from benchmarks.quality.texts import passages, tokenizer_of
from benchmarks.results import once

LENGTHS = (256, 512, 1024, 2048)
FOUND_BY_FULL = 0.8
ANSWER_TOKENS = 24
# (sentence, question in its words, question in other words)
NEEDLES = (
    ("The magic number of Paris is {}.", "What is the magic number of Paris?",
     "Which number is magical in the capital of France?"),
    ("The password of the red door is {}.", "What is the password of the red door?",
     "Which code opens the crimson entrance?"),
    ("The price of the old boat is {} dollars.", "What is the price of the old boat?",
     "How much money does the ancient ship cost?"),
    ("The phone extension of Doctor Brown is {}.", "What is the phone extension of Doctor Brown?",
     "Under which number can the physician Brown be called?"),
)  # fmt: skip


class Haystack:
    """Builds chats around needles; the same for the same number."""

    def __init__(self, model: Path) -> None:
        self.model, self.tokenizer = model, tokenizer_of(model)

    def chat(self, number: int, length: int, kind: str) -> tuple[list[int], str]:
        """(prompt tokens, the number that a right answer contains)."""
        draw = random.Random(f"{number} {length}")
        first, second = draw.sample(NEEDLES, 2)
        codes = [str(draw.randint(1000, 9999)) for _ in range(2)]
        hay = passages(self.model, 32, length)[number % 32]
        pieces = sorted(draw.sample(range(1, 10), 2))
        cuts = [len(hay) * piece // 10 for piece in pieces]
        told = [needle[0].format(code) for needle, code in zip((first, second), codes, strict=True)]
        parts = [hay[: cuts[0]], hay[cuts[0] : cuts[1]], hay[cuts[1] :]]
        texts = [self.tokenizer.decode(part) for part in parts]
        body = f"{texts[0]}\n{told[0]}\n{texts[1]}\n{told[1]}\n{texts[2]}"
        question = second[2] if kind == "paraphrased" else second[1]
        turns = [{"role": "user", "content": f"{body}\n\n{question} Answer with the number."}]
        if kind == "second":
            asked = f"{body}\n\n{first[1]} Answer with the number."
            turns = [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": told[0]},
                {"role": "user", "content": f"{second[1]} Answer with the number."},
            ]
        tokens = self.tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=False
        )
        return list(tokens), codes[1]


def run(
    model: Path,
    policies: Sequence[str],
    ratios: Sequence[float],
    count: int,
    lengths: Sequence[int] = LENGTHS,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(summary, rows)."""
    engine, hay, rows = QualityEngine(model, num_seqs=8), Haystack(model), []
    full = Eviction("keep_all", 1.0)
    for kind in ("plain", "paraphrased", "second"):
        for length in lengths:
            chats = [hay.chat(number, length, kind) for number in range(count)]
            rows.append(_ask(engine, chats, full) | {"kind": kind, "length": length})
            print(short(rows[-1]), flush=True)
            if rows[-1]["found"] < FOUND_BY_FULL:
                continue
            for ratio in ratios:
                for policy in policies:
                    row = _ask(engine, chats, Eviction(policy, ratio))
                    rows.append(row | {"kind": kind, "length": length})
                    print(short(rows[-1]), flush=True)
    return dict(_summary(rows)), rows


def _ask(engine: QualityEngine, chats: Sequence[Any], eviction: Eviction) -> dict[str, Any]:
    prompts = [prompt for prompt, _ in chats]
    outputs = engine.generate(prompts, eviction, max_tokens=ANSWER_TOKENS)
    texts = [output.outputs[0].text for output in outputs]
    found = sum(code in text for text, (_, code) in zip(texts, chats, strict=True))
    return {
        "policy": eviction.policy,
        "keep_ratio": eviction.keep_ratio,
        "chats": len(chats),
        "found": found / len(chats),
    }


def _summary(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, float]]]:
    for row in rows:
        percent = round(100 * row["keep_ratio"])
        name = f"recall_{row['kind']}_{row['length']}_{row['policy']}_{percent}"
        yield name, once(round(row["found"], 4))
