# SPDX-License-Identifier: Apache-2.0
"""One tensor-parallel rank: its own token tables, its votes, its copy engine.

A shard executes plans, it never makes them. Validation never raises: with other ranks waiting in
a collective an exception would hang them, so what does not fit becomes a vote with a reason.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vtoken.errors import InvariantError, PlanError
from vtoken.hole_filling import HoleFilling, check_filling, filling_digest
from vtoken.plan import RelocationPlan, StepOrders, Vote, plan_digest
from vtoken.ports import CopyEngine, ScoreProbe
from vtoken.signals import Observation, Probe
from vtoken.table import TokenTable

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Splice:
    """A committed change of one request's row and its new shift."""

    request_id: str
    source_indices: Int32s
    destination_blocks: Int32s
    shift: int

    def apply(self, row: Sequence[int]) -> list[int]:
        """The new row: sources out, destinations where the first source was."""
        first, gone = int(self.source_indices[0]), set(self.source_indices.tolist())
        kept = [block for i, block in enumerate(row) if i not in gone]
        return [*kept[:first], *self.destination_blocks.tolist(), *kept[first:]]


class Shard:
    """Token tables and open plans of one rank.

    Args:
        row_of: current row of a request in this rank's own runner, or None if it has none.
        check: verify I1 and I2 (``VTOKEN_CHECK=1``).

    Attributes:
        probe: None if no policy of this replica may ask for signals.
    """

    probe: ScoreProbe | None = None

    def __init__(
        self,
        rank: int,
        block_size: int,
        engine: CopyEngine,
        row_of: Callable[[str], list[int] | None],
        check: bool = False,
    ) -> None:
        self.rank = rank
        self.block_size = block_size
        self.engine = engine
        self.row_of = row_of
        self.check = check
        self.tables: dict[str, TokenTable] = {}
        self.incarnations: dict[str, int] = {}
        self._open: dict[int, RelocationPlan] = {}
        self._copying: dict[int, int] = {}  # plan id -> digest voted

    def shift(self, request_id: str) -> int:
        table = self.tables.get(request_id)
        return table.shift if table is not None else 0

    def start(self, request_id: str, incarnation: int) -> None:
        self.stop(request_id)
        self.incarnations[request_id] = incarnation
        if self.probe is not None:
            self.probe.start(request_id)

    def stop(self, request_id: str) -> None:
        """The request has no row here any more: finished, or preempted."""
        self.tables.pop(request_id, None)
        self.incarnations.pop(request_id, None)
        if self.probe is not None:
            self.probe.stop(request_id)

    def settle(self, orders: StepOrders) -> list[Splice]:
        """COMMITs and ABORTs of a step: first of all, also on steps without tokens.

        Both make later work wait for the plan's copy, because the scheduler has put the plan's
        sources (COMMIT) or destinations (ABORT) back into the pool with this very step. A
        COMMIT for a request that is gone or has begun anew changes nothing else.

        Raises:
            InvariantError: an order names a plan that was never prepared here.
        """
        splices = []
        for plan_id in (*orders.aborts, *orders.commits):
            if plan_id not in self._open:
                raise InvariantError(f"plan {plan_id} is not open on rank {self.rank}")
            self.engine.wait(plan_id)
            self._copying.pop(plan_id, None)
            plan = self._open.pop(plan_id)
            same = self.incarnations.get(plan.request_id) == plan.incarnation
            if same and plan_id in orders.commits:
                splices.append(self._splice(plan))
        return splices

    def prepare(self, plans: Sequence[RelocationPlan]) -> list[Vote]:
        """PREPAREs of a step, after its forward was issued: validate, vote, start the copies."""
        votes, fitting = [], []
        for plan in plans:
            self._open[plan.plan_id] = plan
            try:
                digest = self._validate(plan)
            except PlanError as error:
                votes.append(Vote(plan.plan_id, self.rank, 0, False, False, str(error)))
                continue
            fitting.append(plan)
            self._copying[plan.plan_id] = digest
            votes.append(Vote(plan.plan_id, self.rank, digest, True, False))
        if fitting:
            self.engine.start(fitting)
        return votes

    def copied(self) -> list[Vote]:
        """Plans whose copy has ended since the last call."""
        votes = []
        for plan_id, digest in list(self._copying.items()):
            if self.engine.is_done(plan_id):
                del self._copying[plan_id]
                wrong = self._num_wrong(*self._open[plan_id].moves())
                reason = f"I1: {wrong} moved tokens differ from their sources" if wrong else ""
                votes.append(Vote(plan_id, self.rank, digest, not wrong, not wrong, reason))
        return votes

    def observe(self, probes: Sequence[Probe]) -> Callable[[], list[Observation]]:
        """PROBEs of a step, after its forward was issued; the result gives the answers. What does
        not fit is answered with a reason.

        Raises:
            InvariantError: this rank was started without a probe.
        """
        if not probes:
            return list
        if self.probe is None:
            raise InvariantError(f"rank {self.rank} is asked for signals and has no score probe")
        refused, targets = [], []
        for probe in probes:
            try:
                table = self._table(probe.request_id, probe.incarnation, probe.epoch, probe.length)
            except PlanError as error:
                nothing = np.empty(0, np.int32)
                empty = np.empty((len(probe.measures), 0), np.float32)
                refused.append(Observation(probe, nothing, empty, str(error)))
                continue
            targets.append((probe, table.slots(), table.positions.copy()))
        measured = self.probe.measure(targets) if targets else list
        return lambda: [
            *refused,
            *(
                Observation(probe, positions, values)
                for (probe, _, positions), values in zip(targets, measured(), strict=True)
            ),
        ]

    def fill(self, plans: Sequence[HoleFilling]) -> list[Splice]:
        """Reclaims in place of a step: after the splices of ``settle``, before its forward.

        Raises:
            InvariantError: one does not fit. The scheduler's row has changed already, so there is
                no way back.
        """
        splices, moves = [], []
        for plan in plans:
            try:
                table = self._table(plan.request_id, plan.incarnation, plan.epoch, plan.length)
                check_filling(plan, table)
            except PlanError as error:
                raise InvariantError(f"rank {self.rank} cannot fill holes: {error}") from error
            if filling_digest(plan, table) != plan.digest:
                raise InvariantError(f"I6: rank {self.rank} has another table of {plan.request_id}")
            moves.append(plan.moves(table))
            table.fill_holes(plan.source_indices, plan.moved, plan.holes)
            nothing = np.empty(0, np.int32)
            splices.append(Splice(plan.request_id, plan.source_indices, nothing, table.shift))
        if moves:
            sources, destinations = (np.concatenate(slots) for slots in zip(*moves, strict=True))
            self.engine.move(sources, destinations)
            if wrong := self._num_wrong(sources, destinations):
                raise InvariantError(f"I1: {wrong} tokens differ after a move in place")
        return splices

    def _num_wrong(self, sources: Int64s, destinations: Int64s) -> int:
        """0 unless checks are on."""
        if not self.check or not sources.size:
            return 0
        return self.engine.num_wrong_tokens(sources, destinations)

    def _table(self, request_id: str, incarnation: int, epoch: int, length: int) -> TokenTable:
        """This rank's table, brought up to ``length``. Raises PlanError if it is another one."""
        row = self.row_of(request_id)
        if row is None or self.incarnations.get(request_id) != incarnation:
            raise PlanError(f"no row of incarnation {incarnation} on this rank")
        table = self.tables.get(request_id)
        if table is None:
            table = self.tables[request_id] = TokenTable(self.block_size)
        if epoch != table.epoch:
            raise PlanError(f"epoch {epoch}, but the table here is at {table.epoch}")
        table.sync_new_tokens(row[len(table.block_ids) :], length)
        if row[: len(table.block_ids)] != table.block_ids:
            raise PlanError("the row here is not the row of the table")
        return table

    def _validate(self, plan: RelocationPlan) -> int:
        """The plan's digest by this rank's own table. Raises PlanError if it does not fit."""
        plan.check_shapes(self.block_size)
        table = self._table(plan.request_id, plan.incarnation, plan.epoch, plan.length)
        table.check_moves(plan.source_indices, plan.selected, plan.destination_blocks.size)
        if plan.gain < 1:
            raise PlanError("I4: the plan frees nothing")
        row = table.block_ids
        sources = [row[i] for i in plan.source_indices]
        if sources != plan.source_blocks.tolist():
            raise PlanError(f"sources are {sources} here")
        destinations = plan.destination_blocks.tolist()
        if not all(0 < block < self.engine.num_blocks for block in destinations):
            raise PlanError(f"destinations {destinations} are not all blocks of the pool")
        if len({*row, *destinations}) != len(row) + len(destinations):
            raise PlanError("I2: a destination is in the row or twice in the plan")
        return plan_digest(plan, table.positions[plan.source_tokens()[plan.selected]])

    def _splice(self, plan: RelocationPlan) -> Splice:
        table = self.tables[plan.request_id]
        destinations = plan.destination_blocks
        table.apply_moves(plan.source_indices, plan.selected, destinations.tolist())
        if self.check:
            table.check()
        return Splice(plan.request_id, plan.source_indices, destinations, table.shift)
