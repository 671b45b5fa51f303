# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

import numpy as np

from vtoken.policy import Scores, Signal, TokenView


@dataclass(frozen=True)
class StreamingLLM:
    """Keep the first tokens (attention sinks) and a window of the latest ones.

    score = position, and infinity for the sinks. Xiao et al., "Efficient Streaming Language
    Models with Attention Sinks", arXiv 2309.17453. Tokens keep their positions in the text here;
    the paper numbers them anew inside the cache.

    Knobs: none of its own; the request's ``sinks`` says how many first tokens are kept.
    """

    seed: int = 0
    sinks: int = 4
    signals = frozenset[Signal]()

    @property
    def num_protected(self) -> int:
        return self.sinks

    def score(self, view: TokenView) -> Scores:
        scores = view.positions.astype(np.float64)
        scores[view.positions < self.sinks] = np.inf
        return scores
