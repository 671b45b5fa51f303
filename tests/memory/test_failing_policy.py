"""A policy that fails for one request ends that request with an error and disturbs no other."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vtoken.policies import POLICIES
from vtoken.policies.random import Random
from vtoken.policy import Scores, TokenView

pytestmark = pytest.mark.engine


class Broken(Random):
    def score(self, view: TokenView) -> Scores:
        return np.full(view.positions.size, np.nan)


def test_a_failing_policy_ends_its_request_and_no_other(
    start_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICIES, "broken", Broken)
    engine = start_engine(100, {"policy": "random", "budget_tokens": 64})
    prompt = [5 + i % 190 for i in range(100)]
    engine.add(prompt, 300)
    engine.add(prompt, 300, **{"vtoken.policy": "broken"})
    finished = {output.request_id[:9]: output.outputs[0] for output in engine.run()}
    assert finished["request-1"].finish_reason == "length"
    assert len(finished["request-1"].token_ids) == 200
    assert finished["request-2"].finish_reason == "error"
    assert len(finished["request-2"].token_ids) < 200
