# SPDX-License-Identifier: Apache-2.0
"""Counters of one replica's reclamation. Only ever grow."""

from collections import Counter
from dataclasses import dataclass, field

from vtoken.hole_filling import HoleFilling
from vtoken.plan import RelocationPlan


@dataclass
class ReclaimStats:
    plans_prepared: int = 0
    plans_committed: int = 0
    plans_aborted: Counter[str] = field(default_factory=Counter)
    holes_filled: int = 0  # reclaims in place
    tokens_moved: int = 0
    blocks_given_back: int = 0
    scores_nan: int = 0  # tokens kept because their score was not a number
    policies_disabled: int = 0  # of requests that went on without theirs

    def commit(self, plan: RelocationPlan, gain: int) -> None:
        self.plans_committed += 1
        self.tokens_moved += plan.num_moves
        self.blocks_given_back += gain

    def fill(self, plan: HoleFilling) -> None:
        self.holes_filled += 1
        self.tokens_moved += plan.moved.size
        self.blocks_given_back += plan.source_indices.size
