# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

from vtoken.policy import Scores, Signal, TokenView


@dataclass(frozen=True)
class KeyNorm:
    """Keep tokens with small keys: in many models those are the ones that get attention.

    score = - L2 norm of the key, averaged over KV heads and layers. Devoto et al., "A Simple and
    Effective L2 Norm-Based Strategy for KV Cache Compression", arXiv 2406.11430.

    Knobs: none.
    """

    seed: int = 0
    sinks: int = 0
    signals = frozenset({Signal.KEY_NORM})

    @property
    def num_protected(self) -> int:
        return 0

    def score(self, view: TokenView) -> Scores:
        return -view.signals[Signal.KEY_NORM]
