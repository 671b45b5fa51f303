"""A policy that fails for one request is switched off for it, visibly, and disturbs no other."""

from collections.abc import Callable
from typing import Any

import pytest

from vtoken.policies import POLICIES
from vtoken.policies.random import Random
from vtoken.policy import Scores, TokenView

pytestmark = pytest.mark.engine


class Broken(Random):
    def score(self, view: TokenView) -> Scores:
        raise RuntimeError("no such layer")


def test_a_failing_policy_is_switched_off_and_reported(
    start_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICIES, "broken", Broken)
    engine = start_engine(100, {"policy": "random", "budget_tokens": 64})
    prompt = [5 + i % 190 for i in range(100)]
    engine.add(prompt, 300)
    engine.add(prompt, 300, **{"vtoken.policy": "broken"})
    finished = {output.request_id[:9]: output for output in engine.run()}
    reports = {name: output.kv_transfer_params["vtoken"] for name, output in finished.items()}
    for output in finished.values():
        assert output.outputs[0].finish_reason == "length"
        assert len(output.outputs[0].token_ids) == 200
    assert reports["request-1"]["policy_error"] == ""
    assert reports["request-1"]["tokens_evicted"] > 0
    assert "no such layer" in reports["request-2"]["policy_error"]
    assert reports["request-2"]["tokens_evicted"] == 0
