"""The audit trail: one schema, in memory and on disk."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from vtoken.audit import ROWS_PER_FILE, SCHEMA, AuditTrail

ROW = {
    "step": 3,
    "request_id": "r",
    "incarnation": 1,
    "event": "reclaim",
    "first_query": 40,
    "positions": [5, 6],
    "blocks_before": 4,
    "blocks_after": 3,
}


def test_the_schema_is_fixed() -> None:
    """Readers of old trails rely on it: a change here is a change of format."""
    assert [(field.name, str(field.type)) for field in SCHEMA] == [
        ("step", "int64"),
        ("request_id", "string"),
        ("incarnation", "int32"),
        ("event", "string"),
        ("first_query", "int32"),
        ("positions", "list<item: int32>"),
        ("blocks_before", "int32"),
        ("blocks_after", "int32"),
    ]


def test_a_trail_is_a_parquet_dataset(tmp_path: Path) -> None:
    trail = AuditTrail(str(tmp_path / "audit"))
    for part in range(2):
        trail.record(**{**ROW, "step": part})
        path = trail.write()
        assert path == tmp_path / "audit" / f"audit-00000{part}.parquet"
    table = ds.dataset(tmp_path / "audit").to_table()
    assert table.schema.equals(SCHEMA)
    assert table.to_pylist() == [{**ROW, "step": 0}, {**ROW, "step": 1}]
    assert not trail.rows and trail.write() is None


def test_a_long_trail_goes_to_disk_in_parts(tmp_path: Path) -> None:
    trail = AuditTrail(str(tmp_path))
    for step in range(ROWS_PER_FILE + 1):
        trail.record(**{**ROW, "step": step})
    assert len(trail.rows) == 1
    trail.write()
    assert ds.dataset(tmp_path).to_table()["step"].to_pylist() == list(range(ROWS_PER_FILE + 1))


def test_missing_columns_are_null() -> None:
    trail = AuditTrail(keep=True)
    trail.record(step=1, request_id="r")
    (row,) = trail.table().to_pylist()
    assert row["event"] is None and row["positions"] is None


@pytest.mark.parametrize(
    ("arguments", "enabled"),
    [({}, False), ({"keep": True}, True), ({"directory": "somewhere"}, True)],
)
def test_a_trail_is_off_unless_it_has_somewhere_to_go(
    arguments: dict[str, Any], enabled: bool
) -> None:
    trail = AuditTrail(**arguments)
    assert trail.enabled is enabled
    assert trail.write() is None
    assert trail.table().equals(pa.Table.from_pylist([], schema=SCHEMA))
