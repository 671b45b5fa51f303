"""Plans that move every full private block and drop nothing.

No plan of ours frees nothing, and both sides refuse one, so these two refusals are taken away.
"""

from typing import Any

import numpy as np
import pytest

from vtoken.backends import Draft, Limits
from vtoken.plan import RelocationPlan
from vtoken.planner import Planner
from vtoken.reclaimer import Reclaimer


def relocate_everything(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "backend", _every_private_block)
    monkeypatch.setattr(Reclaimer, "_gain_now", lambda self, plan: 1)
    monkeypatch.setattr(RelocationPlan, "gain", property(lambda plan: 1))


def _every_private_block(
    block_live: Any, movable: Any, block_size: int, limits: Limits
) -> Draft | None:
    sources = np.flatnonzero(movable).astype(np.int32)
    if not sources.size or sources.size > limits.max_destinations:
        return None
    return Draft(sources, sources.size)
