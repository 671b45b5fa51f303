# SPDX-License-Identifier: Apache-2.0
"""docs/options.md names every option with the default that it has."""

import json
import re
from pathlib import Path

import pytest

from vtoken.options import EvictionOptions, ReplicaOptions

PAGE = (Path(__file__).parents[2] / "docs" / "options.md").read_text()
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.*?) \| ", PAGE, re.MULTILINE))
IN_WORDS = {"none": None, "if the replica's policy needs it": None, "false": False}


def test_the_page_names_exactly_the_options_there_are() -> None:
    assert list(ROWS) == list(ReplicaOptions.model_fields)
    of_a_request, of_a_replica = PAGE.split("## How a replica reclaims")
    assert all(f"| `{name}` |" in of_a_request for name in EvictionOptions.model_fields)
    assert not any(f"| `{name}` |" in of_a_replica for name in EvictionOptions.model_fields)


@pytest.mark.parametrize("name", ReplicaOptions.model_fields)
def test_a_default_is_what_the_page_says(name: str) -> None:
    said = ROWS[name].strip("`")
    default = ReplicaOptions.model_fields[name].get_default(call_default_factory=True)
    if said in IN_WORDS:
        assert default is IN_WORDS[said]
    elif isinstance(default, str):
        assert default == said
    else:
        assert default == json.loads(said)
