# SPDX-License-Identifier: Apache-2.0
"""What shards measure about the tokens of one request, and what policies make of it.

Attention kernels give no weights. So a shard keeps the latest queries of each request and, when a
policy is due, recomputes their attention over the resident tokens (``vtoken/measure.py``). What it
measured goes up with the step's output and is added up here, by text position: a position never
changes, so nothing here moves when tokens do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Scores = npt.NDArray[np.float64]


class Signal(StrEnum):
    """What a policy can ask for. Attention is averaged over probed layers and heads.

    Only the latest queries are looked at, ``probe_queries`` of them (the observation window). The
    sum takes them for all queries since the measurement before, as far as those came after the
    token.

    ATTENTION_MASS: attention received, summed over all queries so far.
    WINDOW_MASS: mean attention by the window's queries.
    LOW_SHARE: persistence: the share of the window's queries and heads that gave the token less
        than the average of what they saw; equal attention is not less.
    LAST_MASS: attention by the latest query.
    KEY_NORM: L2 norm of the key, mean over layers and KV heads.
    KEY_SIMILARITY: cosine of the key and the mean direction of all resident keys, likewise.
    """

    ATTENTION_MASS = "attention_mass"
    WINDOW_MASS = "window_mass"
    LOW_SHARE = "low_share"
    LAST_MASS = "last_mass"
    KEY_NORM = "key_norm"
    KEY_SIMILARITY = "key_similarity"


class Measure(StrEnum):
    """One row of what a shard sends, float32, a number for each resident token."""

    MEAN_MASS = "mean_mass"  # over the queries of the window
    LAST_MASS = "last_mass"
    LOW_SHARE = "low_share"  # of queries and heads
    KEY_NORM = "key_norm"
    KEY_SIMILARITY = "key_similarity"


# signal -> (the measure it is made of, whether measurements are added up)
_MADE_OF: Mapping[Signal, tuple[Measure, bool]] = {
    Signal.ATTENTION_MASS: (Measure.MEAN_MASS, True),
    Signal.WINDOW_MASS: (Measure.MEAN_MASS, False),
    Signal.LOW_SHARE: (Measure.LOW_SHARE, False),
    Signal.LAST_MASS: (Measure.LAST_MASS, False),
    Signal.KEY_NORM: (Measure.KEY_NORM, False),
    Signal.KEY_SIMILARITY: (Measure.KEY_SIMILARITY, False),
}


def measures_for(signals: frozenset[Signal]) -> tuple[Measure, ...]:
    """What must be measured for these signals, in a fixed order."""
    wanted = {_MADE_OF[signal][0] for signal in signals}
    return tuple(measure for measure in Measure if measure in wanted)


@dataclass(frozen=True)
class Probe:
    """An order to measure one request after the forward that carries it.

    Attributes:
        incarnation, epoch, length: as in a plan; the table that the measurement is about.
        num_queries: how many of the latest queries to look at: those that this row has computed, up
            to the window; 1 if only the newest counts.
        measures: what is wanted.
    """

    request_id: str
    incarnation: int
    epoch: int
    length: int
    num_queries: int
    measures: tuple[Measure, ...]


@dataclass(frozen=True)
class Observation:
    """A shard's answer to a Probe.

    Attributes:
        positions: int32 ``[n]``, text positions of the resident tokens, by the shard's own table.
        values: float32 ``[measures, n]``.
        reason: why there is none; empty if all is well.
    """

    probe: Probe
    positions: Int32s
    values: Floats
    reason: str = ""


@dataclass
class SignalStore:
    """The signals of one incarnation of a request, by text position.

    Attributes:
        observed: tokens that the latest measurement knew: positions from there on have no signal.
    """

    signals: frozenset[Signal]
    observed: int = 0
    _values: dict[Signal, Floats] = field(default_factory=dict)

    def add(self, observation: Observation) -> None:
        """Take one measurement. A token that has left the row keeps what it had."""
        length, positions = observation.probe.length, observation.positions
        # A measurement is a mean over queries of which the newest tokens could be seen by few. What
        # those few gave stands for all queries since the last measurement that could see the token.
        could_see, num_queries = length - positions, observation.probe.num_queries
        weight = np.minimum(length - self.observed, could_see)
        weight = weight * (num_queries / np.minimum(num_queries, could_see))
        rows = dict(zip(observation.probe.measures, observation.values, strict=True))
        for signal in self.signals:
            measure, adds_up = _MADE_OF[signal]
            values = self._array(signal, length)
            if adds_up:
                values[positions] += weight * rows[measure]
            else:
                values[positions] = rows[measure]
        self.observed = length

    def of(self, positions: Int32s) -> dict[Signal, Scores]:
        """Signals of these positions, float64 each; 0 for what was never measured."""
        if not positions.size:
            return {signal: np.empty(0) for signal in self.signals}
        size = int(positions.max()) + 1
        return {
            signal: self._array(signal, size)[positions].astype(np.float64)
            for signal in self.signals
        }

    def _array(self, signal: Signal, size: int) -> Floats:
        array = self._values.get(signal)
        if array is None or array.size < size:
            grown = np.zeros(max(256, 2 * size), np.float32)
            if array is not None:
                grown[: array.size] = array
            array = self._values[signal] = grown
        return array
