# SPDX-License-Identifier: Apache-2.0
"""Real text that every Python brings along: the topics of its manual."""

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any


def tokenizer_of(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def all_topics(model: Path) -> list[int]:
    """Token ids of all topics, in sorted order, joined."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens: list[int] = tokenizer_of(model)(text)["input_ids"]
    return tokens


def windows(model: Path, count: int, size: int) -> list[list[int]]:
    """``count`` windows of ``size`` tokens, one after the other."""
    tokens = all_topics(model)
    if len(tokens) < count * size:
        raise ValueError(f"{len(tokens)} tokens of text, {count * size} wanted")
    return [tokens[i * size : (i + 1) * size] for i in range(count)]


def passages(model: Path, count: int, size: int) -> list[list[int]]:
    """``count`` passages of ``size`` tokens that do not overlap, spread over the whole text."""
    tokens = all_topics(model)
    step = (len(tokens) - size) // count
    if step < size:
        raise ValueError(f"{len(tokens)} tokens of text do not hold {count} passages of {size}")
    return [tokens[i * step : i * step + size] for i in range(count)]
