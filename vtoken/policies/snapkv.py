# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

import numpy as np

from vtoken.policy import Scores, Signal, TokenView


@dataclass(frozen=True)
class SnapKV:
    """Keep what an observation window of the latest queries looks at, with its neighbours.

    score = mean attention by the window, averaged over those of ``kernel`` neighbours in the text
    that are still there. Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation",
    arXiv 2404.14469. Here the window moves on with the text. Its length is the replica's
    ``probe_queries``.

    Knobs:
        kernel: width of the average (tokens, odd, up to 255).
    """

    seed: int = 0
    sinks: int = 0
    kernel: int = 5
    signals = frozenset({Signal.WINDOW_MASS})

    def __post_init__(self) -> None:
        if self.kernel not in range(1, 256, 2):
            raise ValueError("kernel is an odd number up to 255")

    @property
    def num_protected(self) -> int:
        return 0

    def score(self, view: TokenView) -> Scores:
        width = int(self.kernel)
        half = width // 2
        place = view.positions - view.positions.min()
        mass, there = np.zeros((2, place.max() + 1 + 2 * half))
        mass[place + half], there[place + half] = view.signals[Signal.WINDOW_MASS], 1
        near = np.ones(width)
        sums, counts = (np.convolve(a, near, "valid")[place] for a in (mass, there))
        pooled: Scores = sums / counts
        return pooled
