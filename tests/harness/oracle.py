"""What every forward must see, worked out from texts and the audit trail alone.

A token's payload stands for its K/V: it depends on the token, its position and the payloads of all
that its query saw, as in a real model from the second layer on. So a prefix-cache hit on a block
that was computed with evicted context differs from what the oracle expects.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vtoken.options import EvictionOptions

Int32s = npt.NDArray[np.int32]
Payloads = npt.NDArray[np.uint64]
WORD = 2**64


class ContentViolation(AssertionError):
    """A forward saw something else than it should have."""


def payload_of(token: int, position: int, seen: int) -> int:
    """64 bits for one token; ``seen`` is the sum of the payloads that its query saw."""
    word = (token * 0x9E3779B97F4A7C15 + position * 0xC2B2AE3D27D4EB4F + seen) % WORD
    word = (word ^ word >> 31) * 0xD6E8FEB86659FD93 % WORD
    return word ^ word >> 32


def chain(tokens: Sequence[int], start: int, seen: int) -> list[int]:
    """Payloads of the tokens of one chunk, each query seeing the ones before it."""
    payloads = []
    for position, token in enumerate(tokens, start):
        payloads.append(payload_of(token, position, seen))
        seen = (seen + payloads[-1]) % WORD
    return payloads


@dataclass
class Text:
    """One incarnation of a request: payload and state of every computed position."""

    payloads: list[int]
    visible: set[int]
    dead: set[int] = field(default_factory=set)
    incarnation: int = 0


class Oracle:
    """Attributes:
    news: audit rows of the step about to run.
    options: of every request that evicts.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.news: list[dict[str, Any]] = []
        self.options: dict[str, EvictionOptions] = {}
        self.texts: dict[str, Text] = {}
        self.num_checked = 0
        self.num_invisible = 0

    def begin(self, request_id: str, prefix: Sequence[int]) -> None:
        """A row begins; ``prefix`` are the tokens it found in the prefix cache."""
        payloads = chain(prefix, 0, 0)
        self.texts[request_id] = Text(payloads, set(range(len(prefix))))

    def end(self, request_id: str) -> None:
        self.texts.pop(request_id, None)

    def hear(self) -> None:
        """Take the step's news from the audit trail; rows of older incarnations are history."""
        for row in self.news:
            text = self.texts.get(row["request_id"])
            if text is None or row["incarnation"] < text.incarnation:
                continue
            gone = set(row["positions"].tolist())
            if row["event"] == "start":
                text.incarnation = row["incarnation"]
            elif row["event"] == "evict":
                self._evict(text, gone, row["first_query"], self.options[row["request_id"]])
            elif row["event"] == "reclaim":
                self._reclaim(text, gone, row["first_query"])

    def _reclaim(self, text: Text, gone: set[int], first_query: int) -> None:
        assert len(text.payloads) == first_query, "a reclaim at another length"
        if not gone <= text.dead & text.visible:
            raise ContentViolation(f"live tokens reclaimed: {sorted(gone - text.dead)}")
        assert gone and len(gone) % self.block_size == 0
        text.visible -= gone

    def _evict(self, text: Text, gone: set[int], length: int, options: EvictionOptions) -> None:
        assert not gone & text.dead, "a token died twice"
        assert min(gone) >= options.sinks and max(gone) < length - options.recent
        text.dead |= gone

    def check(self, request_id: str, positions: Int32s, payloads: Payloads) -> None:
        """What a forward read is what it must see: each position once, each with its payload."""
        text = self.texts[request_id]
        found = positions.tolist()
        if len(set(found)) != len(found) or set(found) != text.visible:
            wrong = sorted(text.visible.symmetric_difference(found))
            raise ContentViolation(f"{request_id}: positions {wrong} are lost or too many")
        expected = np.array([text.payloads[p] for p in found], np.uint64)
        if not np.array_equal(expected, payloads):
            wrong = positions[expected != payloads].tolist()
            raise ContentViolation(f"{request_id}: positions {wrong} have another content")
        self.num_checked += 1
        self.num_invisible += len(text.payloads) - len(found)

    def append(self, request_id: str, payloads: Sequence[int]) -> None:
        """The forward wrote the next positions."""
        text = self.texts[request_id]
        text.visible.update(range(len(text.payloads), len(text.payloads) + len(payloads)))
        text.payloads.extend(payloads)
