# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

from vtoken.policy import Scores, Signal, TokenView


@dataclass(frozen=True)
class Scissorhands:
    """Keep pivotal tokens: those that seldom got less attention than the average token.

    score = - share of the queries in a history window that gave it less than 1/n of their
    attention (n tokens seen). Importance persists, so what was pivotal stays so. Liu et al.,
    "Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV Cache Compression
    at Test Time", arXiv 2305.17118, algorithm 2. Averaged over heads and layers here; the window
    is the replica's ``probe_queries``, the recent tokens are the request's ``recent``.

    Knobs: none.
    """

    seed: int = 0
    sinks: int = 0
    signals = frozenset({Signal.LOW_SHARE})

    @property
    def num_protected(self) -> int:
        return 0

    def score(self, view: TokenView) -> Scores:
        return -view.signals[Signal.LOW_SHARE]
