# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

import numpy as np

from vtoken.policy import Scores, Signal, TokenView


@dataclass(frozen=True)
class KeepAll:
    """Evict nothing: the baseline every other policy is compared with."""

    seed: int = 0
    sinks: int = 0
    signals = frozenset[Signal]()

    @property
    def num_protected(self) -> int:
        return 0

    def score(self, view: TokenView) -> Scores:
        return np.ones(view.positions.size)
