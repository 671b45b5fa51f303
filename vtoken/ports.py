# SPDX-License-Identifier: Apache-2.0
"""What the core needs from its surroundings: block accounting, copies, measurements."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vtoken.plan import RelocationPlan
from vtoken.signals import Floats, Probe

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class BlockPort(Protocol):
    """What reclamation needs to know of, and do to, the engine's block accounting."""

    def num_blocks(self) -> int:
        """Blocks that requests can ever hold."""
        ...

    def num_free(self) -> int: ...

    def take(self, count: int) -> list[int]:
        """Allocate ``count`` blocks as destinations; the caller knows they are free."""
        ...

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Return blocks to the pool; of unhashed ones the first is reused first."""
        ...

    def length(self, request_id: str) -> int:
        """Tokens whose K/V exists once every step scheduled so far has run."""
        ...

    def row_from(self, request_id: str, start: int) -> list[int]:
        """Block ids of the request's row from row index ``start`` on."""
        ...

    def private(self, request_id: str) -> npt.NDArray[np.bool_]:
        """bool ``[blocks]``, a fresh array: which blocks of the row nobody else references."""
        ...

    def forget_hashes(self, block_ids: Sequence[int]) -> None:
        """Blocks whose content changes, or will: the prefix cache must not offer them."""
        ...

    def replace_row(self, request_id: str, block_ids: Sequence[int], shift: int) -> None:
        """The row is ``block_ids`` from now on; neither takes nor returns blocks."""
        ...

    def growth(self) -> int:
        """Blocks that running requests may need before a plan opened now can close."""
        ...

    def surplus(self, request_id: str) -> int:
        """Blocks of its row beyond those that admission counts on: what it gives back of the
        others is still promised to it, so nobody else is admitted for them."""
        ...


class CopyEngine(Protocol):
    """Moves K/V of all layers. ``start`` must order the copies after the forward just issued."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool that it copies in, vLLM's null block 0 included."""
        ...

    def start(self, plans: Sequence[RelocationPlan]) -> None: ...

    def is_done(self, plan_id: int) -> bool:
        """Whether every byte of the plan has arrived (never blocks)."""
        ...

    def wait(self, plan_id: int) -> None:
        """Order everything issued from now on after the plan's copy (a no-op if it was never
        started), then forget the plan."""
        ...

    def move(self, sources: Int64s, destinations: Int64s) -> None:
        """Copy slots to slots now, before anything issued later; the two sets are disjoint."""
        ...

    def num_wrong_tokens(self, sources: Int64s, destinations: Int64s) -> int:
        """Slots among the destinations whose bytes differ from those of their source (I1)."""
        ...


class ScoreProbe(Protocol):
    """Measures what the latest queries of a request see. Knows requests from start to stop."""

    def start(self, request_id: str) -> None: ...

    def stop(self, request_id: str) -> None: ...

    def measure(
        self, targets: Sequence[tuple[Probe, Int64s, Int32s]]
    ) -> Callable[[], list[Floats]]:
        """Measure behind the forward just issued. The result, when called, gives float32
        ``[measures, resident]`` for each (order, slots of the resident tokens, their positions)."""
        ...
