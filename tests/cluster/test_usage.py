# SPDX-License-Identifier: Apache-2.0
"""The engine's report moves from kv_transfer_params into usage, and nothing else changes."""

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from worker.usage import add_to_usage_chunk, install_usage_hooks, move_report

REPORT = {"policy": "random", "tokens_evicted": 7}
TEXT_CHUNK = 'data: {"choices":[{"index":0,"delta":{"content":"\\"choices\\":[]"}}]}\n\n'
USAGE_CHUNK = 'data: {"choices":[],"usage":{"total_tokens":9}}\n\n'
DONE = "data: [DONE]\n\n"


def make_response(params: Any) -> Any:
    return SimpleNamespace(
        kv_transfer_params=params, usage=SimpleNamespace(), choices=["only"], id="x"
    )


class FakeChat:
    """The two methods that the hooks wrap, with the real ones' leading parameters."""

    async def chat_completion_full_generator(self, request: Any, outputs: Any, *rest: Any) -> Any:
        async for output in outputs:
            last = output
        return make_response(last.kv_transfer_params)

    async def chat_completion_stream_generator(
        self, request: Any, outputs: Any, *rest: Any
    ) -> AsyncGenerator[str, None]:
        async for _ in outputs:
            yield TEXT_CHUNK
        yield USAGE_CHUNK
        yield DONE


async def engine_outputs(*params: Any) -> AsyncGenerator[Any, None]:
    for value in params:
        yield SimpleNamespace(kv_transfer_params=value)


@pytest.fixture
def chat() -> FakeChat:
    chat = FakeChat()
    install_usage_hooks(SimpleNamespace(openai_serving_chat=chat, openai_serving_completion=None))
    return chat


def stream(chat: FakeChat, outputs: Any, n: int | None = 1) -> list[str]:
    async def collect() -> list[str]:
        request = SimpleNamespace(n=n)
        return [chunk async for chunk in chat.chat_completion_stream_generator(request, outputs)]

    return asyncio.run(collect())


def usage_of(chunks: list[str]) -> dict[str, Any]:
    usage: dict[str, Any] = json.loads(chunks[-2].removeprefix("data: "))["usage"]
    return usage


def test_report_moves_and_other_parameters_stay() -> None:
    response = make_response({"vtoken": REPORT, "remote": 1})
    move_report(response, attributable=True)
    assert response.usage.vtoken == REPORT
    assert response.kv_transfer_params == {"remote": 1}


def test_emptied_parameters_become_none() -> None:
    response = make_response({"vtoken": REPORT})
    move_report(response, attributable=True)
    assert response.kv_transfer_params is None


def test_report_of_one_of_several_sequences_is_dropped() -> None:
    response = make_response({"vtoken": REPORT})
    move_report(response, attributable=False)
    assert not hasattr(response.usage, "vtoken")
    assert response.kv_transfer_params is None


@pytest.mark.parametrize("params", [None, {}, {"remote": 1}])
def test_response_without_report_is_left_alone(params: Any) -> None:
    response = make_response(params)
    move_report(response, attributable=True)
    assert response.kv_transfer_params is params
    assert not hasattr(response.usage, "vtoken")


def test_only_the_usage_chunk_changes() -> None:
    assert add_to_usage_chunk(TEXT_CHUNK, REPORT) == TEXT_CHUNK
    assert add_to_usage_chunk(DONE, REPORT) == DONE
    changed = add_to_usage_chunk(USAGE_CHUNK, REPORT)
    assert changed.endswith("}\n\n")
    assert usage_of([changed, DONE]) == {"total_tokens": 9, "vtoken": REPORT}


def test_stream_carries_the_last_outputs_report(chat: FakeChat) -> None:
    chunks = stream(chat, engine_outputs(None, None, {"vtoken": REPORT}))
    assert chunks[:3] == [TEXT_CHUNK] * 3
    assert chunks[-1] == DONE
    assert usage_of(chunks) == {"total_tokens": 9, "vtoken": REPORT}


def test_stream_of_several_sequences_carries_none(chat: FakeChat) -> None:
    chunks = stream(chat, engine_outputs({"vtoken": REPORT}), n=2)
    assert usage_of(chunks) == {"total_tokens": 9}


def test_full_response_carries_the_report(chat: FakeChat) -> None:
    outputs = engine_outputs(None, {"vtoken": REPORT})
    response = asyncio.run(chat.chat_completion_full_generator(SimpleNamespace(n=1), outputs))
    assert response.usage.vtoken == REPORT
