# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

import numpy as np

from vtoken.policy import Scores, Signal, TokenView


@dataclass(frozen=True)
class SnapKV:
    """Keep what an observation window of the latest queries looks at, with its neighbours.

    score = mean attention by the window, averaged over ``kernel`` neighbours in the text. Li et
    al., "SnapKV: LLM Knows What You are Looking for Before Generation", arXiv 2404.14469. Here the
    window moves on with the text. Its length is the replica's ``probe_queries``.

    Knobs:
        kernel: width of the average (tokens, odd).
    """

    seed: int = 0
    sinks: int = 0
    kernel: int = 5
    signals = frozenset({Signal.WINDOW_MASS})

    @property
    def num_protected(self) -> int:
        return 0

    def score(self, view: TokenView) -> Scores:
        order = np.argsort(view.positions)
        mass = np.pad(view.signals[Signal.WINDOW_MASS][order], self.kernel // 2)
        pooled = np.empty(order.size)
        pooled[order] = np.convolve(mass, np.full(self.kernel, 1 / self.kernel), "valid")
        return pooled
