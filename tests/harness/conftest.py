"""Replicas for scenarios. What a test leaves running must come to a clean end."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness.replica import Replica, Setting
from harness.scenes import EAGER


@pytest.fixture
def make() -> Iterator[Callable[..., Replica]]:
    """Makes replicas; in the end each must run to its end and leave nothing behind."""
    made: list[Replica] = []

    def make_replica(vtoken: dict[str, Any] | None = None, **setting: Any) -> Replica:
        made.append(Replica(Setting(stops=False, vtoken=EAGER | (vtoken or {}), **setting)))
        return made[-1]

    yield make_replica
    for replica in made:
        if replica.healthy:
            replica.run_to_the_end()
            replica.check_clean()
