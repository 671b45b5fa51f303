# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

from vtoken.policy import Scores, Signal, TokenView


@dataclass(frozen=True)
class KeyDiff:
    """Keep tokens whose keys differ from the others: similar ones stand for each other.

    score = - cosine of the key and the mean direction of all resident keys, averaged over KV heads
    and layers. Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM
    Inference in Resource-Constrained Environments", arXiv 2504.15364.

    Knobs: none.
    """

    seed: int = 0
    sinks: int = 0
    signals = frozenset({Signal.KEY_SIMILARITY})

    @property
    def num_protected(self) -> int:
        return 0

    def score(self, view: TokenView) -> Scores:
        return -view.signals[Signal.KEY_SIMILARITY]
