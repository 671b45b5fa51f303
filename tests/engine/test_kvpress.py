# SPDX-License-Identifier: Apache-2.0
"""Our policies keep the tokens that kvpress's scores would keep, reduced as our probe reduces.

``make kvpress`` compares more texts and all heads; this is an extract of what kvpress said, made by
benchmarks/quality/agreement.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.engine

FIXTURE = json.loads((Path(__file__).parent / "fixtures" / "kvpress.json").read_text())
SINKS, RECENT, KEPT = 4, 32, 64


def kept_by_kvpress(press: str) -> set[int]:
    layers = FIXTURE["scores"][press].values()
    reduced = np.mean([heads for layer in layers for heads in layer], axis=0)
    reduced[:SINKS] = reduced[-RECENT:] = np.inf
    return set(np.argsort(-reduced, kind="stable")[:KEPT].tolist())


@pytest.mark.parametrize("policy", FIXTURE["scores"])
def test_a_policy_keeps_what_kvpress_keeps(
    start_engine: Callable[..., Any], greedy: Callable[..., Any], policy: str
) -> None:
    engine, tokens = start_engine(), FIXTURE["tokens"]
    options = {
        "vtoken.policy": policy,
        "vtoken.keep_ratio": 0.5,
        "vtoken.sinks": SINKS,
        "vtoken.recent": RECENT,
        "vtoken.evict_after_tokens": 0,
    }
    (output,) = engine.run([tokens], greedy(options, 8))
    rows = engine.audit_rows(output.request_id)
    first = next(row for row in rows if row["event"] == "evict")
    ours = set(range(len(tokens))) - set(first["positions"].tolist())
    assert len(ours) == KEPT
    agreement = {press: len(ours & kept_by_kvpress(press)) / KEPT for press in FIXTURE["scores"]}
    assert agreement[policy] >= (1.0 if policy == "streaming_llm" else 0.95)
    others = [share for press, share in agreement.items() if press != policy]
    assert max(others) < 0.95, "a control: the sets of other presses are other sets"
