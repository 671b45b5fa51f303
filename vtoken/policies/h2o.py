# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

import numpy as np

from vtoken.policy import Scores, Signal, TokenView


@dataclass(frozen=True)
class H2O:
    """Keep heavy hitters: the tokens that received most attention so far, and the latest ones.

    score = attention mass summed over all queries, averaged over heads and layers; infinity for
    the latest ``recent_share`` of the budget. Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient
    Generative Inference of Large Language Models", arXiv 2306.14048.

    Knobs:
        recent_share: of the budget, kept for the latest tokens (0 to 1; the paper's half).
    """

    seed: int = 0
    sinks: int = 0
    recent_share: float = 0.5
    signals = frozenset({Signal.ATTENTION_MASS})

    def __post_init__(self) -> None:
        if not 0 <= self.recent_share <= 1:
            raise ValueError("recent_share is from 0 to 1")

    @property
    def num_protected(self) -> int:
        return 0

    def score(self, view: TokenView) -> Scores:
        window = int(view.budget * self.recent_share)
        latest = view.positions >= view.length - window
        return np.where(latest, np.inf, view.signals[Signal.ATTENTION_MASS])
