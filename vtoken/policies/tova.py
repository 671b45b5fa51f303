# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

from vtoken.policy import Scores, Signal, TokenView


@dataclass(frozen=True)
class TOVA:
    """Keep what the latest token looks at (token omission via attention).

    score = attention by the latest query, averaged over heads and layers. Oren et al.,
    "Transformers are Multi-State RNNs", arXiv 2401.06104.

    Knobs: none.
    """

    seed: int = 0
    sinks: int = 0
    signals = frozenset({Signal.LAST_MASS})

    @property
    def num_protected(self) -> int:
        return 0

    def score(self, view: TokenView) -> Scores:
        return view.signals[Signal.LAST_MASS]
