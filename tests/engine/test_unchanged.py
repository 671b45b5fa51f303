# SPDX-License-Identifier: Apache-2.0
"""Nothing evicted, nothing changed (I7): keep_all answers byte for byte as stock vLLM does."""

from typing import Any

import pytest

pytestmark = pytest.mark.engine


def hook_calls(engine: Any) -> int:
    (calls,) = engine.llm.collective_rpc("vtoken_hook_calls")
    return int(calls)


def test_keep_all_answers_as_stock_vllm(
    engine: Any,
    prompts: list[list[int]],
    stock_outputs: list[dict[str, Any]],
    greedy: Any,
) -> None:
    calls, stats = hook_calls(engine), engine.scheduler.reclaimer.stats
    plans = stats.plans_prepared
    outputs = engine.run(prompts, greedy({"vtoken.policy": "keep_all"}))
    assert hook_calls(engine) > calls
    assert stats.plans_prepared == plans
    assert sum(output.num_cached_tokens >= 64 for output in outputs) >= 8
    completions = [output.outputs[0] for output in outputs]
    assert [c.text.encode() for c in completions] == [s["text"].encode() for s in stock_outputs]
    assert [list(c.token_ids) for c in completions] == [s["token_ids"] for s in stock_outputs]
