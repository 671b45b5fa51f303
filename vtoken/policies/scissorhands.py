# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

from vtoken.policy import Scores, Signal, TokenView


@dataclass(frozen=True)
class Scissorhands:
    """Keep pivotal tokens: those that seldom got less attention than the average token.

    score = - (number of queries that gave it less than 1/n of their attention, n tokens seen).
    Importance persists, so what was pivotal stays so. Liu et al., "Scissorhands: Exploiting the
    Persistence of Importance Hypothesis for LLM KV Cache Compression at Test Time",
    arXiv 2305.17118, algorithm 2. Here the count is over all queries since the token came, not
    over a history window, and averaged over heads.

    Knobs: none.
    """

    seed: int = 0
    sinks: int = 0
    signals = frozenset({Signal.LOW_COUNT})

    @property
    def num_protected(self) -> int:
        return 0

    def score(self, view: TokenView) -> Scores:
        return -view.signals[Signal.LOW_COUNT]
