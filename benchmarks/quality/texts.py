# SPDX-License-Identifier: Apache-2.0
"""Real text that every Python brings along: the topics of its manual."""

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any


def tokenizer_of(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def windows(tokenizer: Any, count: int, size: int) -> list[list[int]]:
    """``count`` windows of ``size`` tokens, one after the other, of the topics in sorted order."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = tokenizer(text)["input_ids"]
    if len(tokens) < count * size:
        raise ValueError(f"{len(tokens)} tokens of text, {count * size} wanted")
    return [tokens[i * size : (i + 1) * size] for i in range(count)]


def passages(tokenizer: Any, count: int, size: int) -> list[list[int]]:
    """``count`` different passages of ``size`` tokens, spread over the whole text."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = tokenizer(text)["input_ids"]
    step = (len(tokens) - size) // count
    if step < size:
        raise ValueError(f"{len(tokens)} tokens of text do not hold {count} passages of {size}")
    return [tokens[i * step : i * step + size] for i in range(count)]
