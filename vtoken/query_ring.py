# SPDX-License-Identifier: Apache-2.0
"""The latest queries of every request, in one buffer a probed layer.

Shape letters: T tokens of a step, R rows (requests), W window, H query heads, D head size.
"""

import torch


class QueryRing:
    """Query at position p of the request in row r lies at ``r * W + p % W``.

    Args:
        shape: (layers, rows, W, H, D).

    Attributes:
        window: W.
    """

    def __init__(
        self, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        num_layers, num_rows, self.window, heads, size = shape
        self._queries = torch.zeros(
            num_layers, num_rows * self.window, heads, size, dtype=dtype, device=device
        )
        self._tokens = torch.empty(0, dtype=torch.int64, device=device)
        self._places = torch.empty(0, dtype=torch.int64, device=device)

    def begin_step(
        self, rows_T: torch.Tensor, positions_T: torch.Tensor, last_T: torch.Tensor
    ) -> None:
        """Say whose tokens the next forward computes.

        Args:
            rows_T: int64, the row of each token's request; -1 for requests that need none.
            positions_T: int64, their text positions.
            last_T: int64, the last position of each token's request in this step.
        """
        kept_T = (positions_T > last_T - self.window) & (rows_T >= 0)
        self._tokens = torch.nonzero(kept_T).flatten()
        offsets = positions_T[self._tokens] % self.window
        self._places = rows_T[self._tokens] * self.window + offsets

    def record(self, layer: int, query_THD: torch.Tensor) -> None:
        """Keep what the step's queries leave in the window. Called inside the forward."""
        self._queries[layer].index_copy_(0, self._places, query_THD[self._tokens])

    def read(self, layer: int, row: int, length: int, count: int) -> torch.Tensor:
        """``[count, H, D]``: queries of the last positions below ``length``, oldest first."""
        positions = torch.arange(length - count, length, device=self._queries.device)
        return self._queries[layer, row * self.window + positions % self.window]
