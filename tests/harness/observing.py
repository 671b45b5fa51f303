"""Every measurement that reaches a scheduler."""

import pytest

from vtoken.policy_runs import PolicyRuns
from vtoken.signals import Observation


def observations_of(runs: PolicyRuns, monkeypatch: pytest.MonkeyPatch) -> list[Observation]:
    """A list that grows as they arrive."""
    found: list[Observation] = []
    answer = runs.answer

    def keep(observation: Observation) -> None:
        found.append(observation)
        answer(observation)

    monkeypatch.setattr(runs, "answer", keep)
    return found
