# SPDX-License-Identifier: Apache-2.0
"""Score probe for K/V tensors in host memory: measures when it is asked to.

Shape letters: T tokens of a step, N resident tokens, K KV heads, H query heads, D head size.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from vtoken.measure import Heads, OverGroup, measure_layer, no_group
from vtoken.query_ring import QueryRing
from vtoken.signals import Floats, Probe

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class CpuProbe:
    """Keeps the latest queries of up to ``num_rows`` requests and measures what they see.

    Args:
        ring: with as many layers as ``keys_of`` and ``num_rows`` rows.
        keys_of: for each probed layer slots int64 ``[N]`` -> keys ``[N, K, D]``.
        over_group: adds the heads of the other tensor-parallel ranks.
    """

    def __init__(
        self,
        ring: QueryRing,
        keys_of: Sequence[Callable[[Int64s], torch.Tensor]],
        heads: Heads,
        num_rows: int,
        over_group: OverGroup = no_group,
    ) -> None:
        self.ring = ring
        self.over_group = over_group
        self.keys_of = keys_of
        self.heads = heads
        self._rows: dict[str, int] = {}
        self._free = list(range(num_rows))

    def start(self, request_id: str) -> None:
        if request_id not in self._rows:
            self._rows[request_id] = self._free.pop()

    def stop(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    def begin_step(
        self, request_ids: Sequence[str], counts: torch.Tensor, positions_T: torch.Tensor
    ) -> None:
        """Say whose tokens the next forward computes.

        Args:
            counts: int64 ``[requests]``, tokens of each; their positions follow each other.
        """
        rows = torch.tensor([self._rows.get(request_id, -1) for request_id in request_ids])
        ends = counts.cumsum(0)
        last = positions_T[ends - 1]
        per_token = torch.repeat_interleave(torch.stack([rows, last]), counts, dim=1)
        self.ring.begin_step(per_token[0], positions_T, per_token[1])

    def measure(
        self, targets: Sequence[tuple[Probe, Int64s, Int32s]]
    ) -> Callable[[], list[Floats]]:
        """Measure requests whose forward has just run, now.

        Args:
            targets: (order, slots of the resident tokens, their text positions).

        Returns:
            For each float32 ``[measures, N]``, mean over the probed layers.
        """
        measured = [self._measure_one(*target) for target in targets]
        return lambda: measured

    def _measure_one(self, probe: Probe, slots: Int64s, positions: Int32s) -> Floats:
        row, where = self._rows[probe.request_id], torch.from_numpy(positions.astype(np.int64))
        layers = []
        for layer, keys_of in enumerate(self.keys_of):
            query = self.ring.read(layer, row, probe.length, probe.num_queries)
            layers.append(measure_layer(query, keys_of(slots), where, self.heads, probe.measures))
        by_measure = zip(probe.measures, torch.stack(layers, 1), strict=True)
        rows = [self.over_group(values, self.heads.how(m)).mean(0) for m, values in by_measure]
        measured: Floats = torch.stack(rows).numpy()
        return measured
