# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from vtoken.policy import Scores, Signal, TokenView


@dataclass(frozen=True)
class Random:
    """Keep a uniform sample of the text: the worst case for block-level reclamation.

    Every position has a fixed random number and the highest are kept (bottom-k sampling), so
    the survivors are at any time a uniform sample of all positions that are not protected,
    without state and independent of when the policy runs.
    Stress baseline of the vToken paper (arXiv 2608.13263, section 2).

    Knobs:
        seed: chooses the sample.
    """

    seed: int = 0
    sinks: int = 0
    signals = frozenset[Signal]()

    @property
    def num_protected(self) -> int:
        return 0

    def score(self, view: TokenView) -> Scores:
        return _numbers(self.seed, 1 << view.length.bit_length())[view.positions]


@lru_cache(maxsize=64)
def _numbers(seed: int, size: int) -> Scores:
    # A longer array starts with the same numbers, so growing never changes a score.
    return np.random.Generator(np.random.PCG64(seed)).random(size)
