# SPDX-License-Identifier: Apache-2.0
"""Figures and the README's table come from the committed result files."""

import json
from pathlib import Path

import pytest

from benchmarks.figures import FIGURES, OUT, draw, result_of
from benchmarks.results import RESULTS
from benchmarks.table import table

PATHS = {name: result_of(name) for name in FIGURES}
NAMES = [name for name, path in PATHS.items() if path.exists()]


def test_the_readme_has_the_table_of_the_result_files() -> None:
    assert table() in (RESULTS.parents[1] / "README.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_shows_its_result_file(name: str, tmp_path: Path) -> None:
    drawn = draw(name, json.loads(PATHS[name].read_text()), tmp_path).read_text()
    assert (OUT / f"{name}.svg").read_text() == drawn, "python -m benchmarks.figures"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_names_its_commit_machine_and_spread(path: Path) -> None:
    result = json.loads(path.read_text())
    for measured in (result, *result.get("parts", {}).values()):
        assert len(measured["commit"]) == 40 and measured["date"] and measured["machine"]
        assert not measured["uncommitted_changes"]
    for entry in result["summary"].values():
        assert entry["min"] <= entry["median"] <= entry["max"]
