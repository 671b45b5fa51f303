# SPDX-License-Identifier: Apache-2.0
"""Moves what eviction did to a request from `kv_transfer_params` into `usage`.

The engine's report arrives in `kv_transfer_params["vtoken"]` of a request's last output. vLLM
copies that field into the responses that do not stream, and nowhere into those that do. The hooks
below wrap three methods of the serving objects of one app, so that clients find the report at
`usage["vtoken"]` either way.

Like vLLM's own per-request metrics the report describes one sequence: a request with `n > 1` or
with several prompts gets none.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

KEY = "vtoken"
Report = dict[str, Any]


def install_usage_hooks(state: Any) -> None:
    """Wrap the chat and completion serving objects in `state`, an app's vLLM state."""
    chat, completion = state.openai_serving_chat, state.openai_serving_completion
    if chat is not None:
        chat.chat_completion_full_generator = _full_chat(chat.chat_completion_full_generator)
        chat.chat_completion_stream_generator = _stream_chat(chat.chat_completion_stream_generator)
    if completion is not None:
        completion.request_output_to_completion_response = _full_completion(
            completion.request_output_to_completion_response
        )
        completion.completion_stream_generator = _stream_completion(
            completion.completion_stream_generator
        )


def move_report(response: Any, *, attributable: bool) -> None:
    """Take the report out of a response's `kv_transfer_params`; put it into its usage.

    Mutates `response`. A response without a report is left alone.
    """
    params = response.kv_transfer_params
    if not params or KEY not in params:
        return
    rest = {name: value for name, value in params.items() if name != KEY}
    response.kv_transfer_params = rest or None
    if attributable:
        setattr(response.usage, KEY, params[KEY])


def add_to_usage_chunk(chunk: str, report: Report) -> str:
    """Return a server-sent event with `report` in its usage, if it is the usage chunk.

    The usage chunk is the only one without choices. Other events are returned as they are.
    """
    if not chunk.startswith("data: {") or '"choices":[]' not in chunk:
        return chunk
    body = json.loads(chunk[len("data: ") :])
    if not body.get("usage"):
        return chunk
    body["usage"][KEY] = report
    return f"data: {json.dumps(body, separators=(',', ':'), ensure_ascii=False)}\n\n"


def _full_chat(original: Callable[..., Any]) -> Callable[..., Any]:
    async def full_generator(*args: Any, **kwargs: Any) -> Any:
        response = await original(*args, **kwargs)
        if hasattr(response, "kv_transfer_params"):  # not an ErrorResponse
            move_report(response, attributable=len(response.choices) == 1)
        return response

    return full_generator


def _full_completion(original: Callable[..., Any]) -> Callable[..., Any]:
    def to_response(*args: Any, **kwargs: Any) -> Any:
        response = original(*args, **kwargs)
        move_report(response, attributable=len(response.choices) == 1)
        return response

    return to_response


def _stream_chat(original: Callable[..., Any]) -> Callable[..., Any]:
    def stream(request: Any, outputs: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[str, None]:
        reports: list[Report] = []
        chunks = original(request, _watch(outputs, reports), *args, **kwargs)
        return _add_report(chunks, reports) if (request.n or 1) == 1 else chunks

    return stream


def _stream_completion(original: Callable[..., Any]) -> Callable[..., Any]:
    def stream(
        request: Any, prompts: Any, outputs: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[str, None]:
        reports: list[Report] = []
        chunks = original(request, prompts, _watch(outputs, reports), *args, **kwargs)
        single = (request.n or 1) == 1 and len(prompts) == 1
        return _add_report(chunks, reports) if single else chunks

    return stream


async def _add_report(
    chunks: AsyncGenerator[str, None], reports: list[Report]
) -> AsyncGenerator[str, None]:
    # The last output, which carries the report, is read before the usage chunk is written.
    async with aclosing(chunks):
        async for chunk in chunks:
            yield add_to_usage_chunk(chunk, reports[-1]) if reports else chunk


async def _watch(outputs: AsyncIterator[Any], reports: list[Report]) -> AsyncGenerator[Any, None]:
    """Pass engine outputs through; append each report that goes by to `reports`.

    A completion's outputs come as `(prompt index, output)`, a chat's as outputs.
    """
    async for item in outputs:
        output = item[1] if isinstance(item, tuple) else item
        if output.kv_transfer_params and KEY in output.kv_transfer_params:
            reports.append(output.kv_transfer_params[KEY])
        yield item
