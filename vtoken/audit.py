# SPDX-License-Identifier: Apache-2.0
"""The audit trail: what was evicted and reclaimed, when, as Arrow record batches.

With it an outsider can rebuild the visibility mask of every request (design section 6): position
k is visible to query q iff k <= q and q < first query computed after k was reclaimed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from vtoken.request import EvictingRequest

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("request_id", pa.string()),
        ("incarnation", pa.int32()),
        # start | evict | reclaim | drop
        ("event", pa.string()),
        # First query position computed under the new state.
        ("first_query", pa.int32()),
        # evict, reclaim: the text positions concerned.
        ("positions", pa.list_(pa.int32())),
        ("blocks_before", pa.int32()),
        ("blocks_after", pa.int32()),
    ]
)

ROWS_PER_FILE = 4096


class AuditTrail:
    """Collects events in memory; ``write`` appends them as one Parquet file of a dataset.

    Disabled (``directory`` None and ``keep`` False) it records nothing and costs one test.

    Attributes:
        step: the one that is being decided; set by the reclaimer.
    """

    step = 0

    def __init__(self, directory: str | None = None, keep: bool = False) -> None:
        self.directory = Path(directory) if directory else None
        self.enabled = keep or self.directory is not None
        self.rows: list[dict[str, object]] = []
        self._files = 0

    def note(
        self,
        request: "EvictingRequest",
        event: str,
        positions: Sequence[int] | npt.NDArray[np.int32] = (),
        blocks_before: int = 0,
    ) -> None:
        """Record what has just been done to a request, in the step that is being decided."""
        if self.enabled:
            self.record(
                step=self.step,
                request_id=request.request_id,
                incarnation=request.incarnation,
                event=event,
                first_query=request.table.length,
                positions=np.asarray(positions, np.int32),
                blocks_before=blocks_before,
                blocks_after=len(request.table.block_ids),
            )

    def record(self, **row: object) -> None:
        """Append one event; missing columns are null. Long trails go to disk by the part."""
        self.rows.append(row)
        if self.directory is not None and len(self.rows) >= ROWS_PER_FILE:
            self.write()

    def table(self) -> pa.Table:
        return pa.Table.from_pylist(self.rows, schema=SCHEMA)

    def write(self) -> Path | None:
        """Flush to ``directory``; None when there is nothing to write or nowhere to."""
        if self.directory is None or not self.rows:
            return None
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"audit-{self._files:06d}.parquet"
        pq.write_table(self.table(), path)
        self._files += 1
        self.rows.clear()
        return path
