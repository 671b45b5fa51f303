# SPDX-License-Identifier: Apache-2.0
"""An exchange with an ASGI app behaves as a connection to a server does."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cluster import bridge
from cluster.bridge import HttpHead, HttpRequest, exchange

REQUEST = HttpRequest("POST", "/v1/a b", b"x=1", ((b"content-type", b"text/plain"),), b"question")
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


def start(status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def collect(app: Any) -> list[HttpHead | bytes]:
    return [item async for item in exchange(app, REQUEST)]


async def leave_after_head(app: Any) -> None:
    items = exchange(app, REQUEST)
    await anext(items)
    await items.aclose()


def test_app_sees_the_whole_request_once() -> None:
    seen: dict[str, Any] = {}

    async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        seen.update(scope, message=await receive())
        await send(start())
        await send(body(b"", more=False))

    asyncio.run(collect(app))
    assert seen["method"] == "POST"
    assert (seen["path"], seen["raw_path"]) == ("/v1/a b", b"/v1/a%20b")
    assert seen["query_string"] == b"x=1"
    assert seen["headers"] == [(b"content-type", b"text/plain")]
    assert seen["message"] == {"type": "http.request", "body": b"question", "more_body": False}


def test_head_comes_first_and_pieces_as_they_are_sent() -> None:
    async def app(scope: Any, receive: Receive, send: Send) -> None:
        await send(start(201, ((b"X-A", b"1"), (b"Connection", b"close"))))
        for piece in (b"one", b"two"):
            await asyncio.sleep(0.01)
            await send(body(piece))
        await send(body(b"", more=False))

    head = HttpHead(201, ((b"x-a", b"1"),))
    assert asyncio.run(collect(app)) == [head, b"one", b"two"]


def test_pieces_that_pile_up_are_joined() -> None:
    async def app(scope: Any, receive: Receive, send: Send) -> None:
        await send(start())
        for piece in (b"a", b"b", b"c"):
            await send(body(piece))
        await send(body(b"", more=False))

    assert asyncio.run(collect(app)) == [HttpHead(200, ()), b"abc"]


def test_client_that_leaves_is_seen_as_a_disconnect() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        await receive()
        await send(start())
        seen.append((await receive())["type"])

    async def scenario() -> None:
        await leave_after_head(app)
        await asyncio.sleep(0.01)
        assert not bridge._abandoned

    asyncio.run(scenario())
    assert seen == ["http.disconnect"]


def test_cancelled_caller_is_seen_as_a_disconnect() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        await receive()
        seen.append((await receive())["type"])

    async def scenario() -> None:
        caller = asyncio.ensure_future(collect(app))
        await asyncio.sleep(0.01)
        caller.cancel()
        await asyncio.sleep(0.01)
        assert caller.cancelled()
        assert not bridge._abandoned

    asyncio.run(scenario())
    assert seen == ["http.disconnect"]


def test_app_that_ignores_a_disconnect_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "GRACE_S", 0.02)
    ended: list[str] = []

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        await send(start())
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def scenario() -> None:
        await leave_after_head(app)
        assert len(bridge._abandoned) == 1
        await asyncio.sleep(0.1)
        assert not bridge._abandoned

    asyncio.run(scenario())
    assert ended == ["cancelled"]


def test_error_before_the_response_is_complete_reaches_the_caller() -> None:
    async def app(scope: Any, receive: Receive, send: Send) -> None:
        await send(start())
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        asyncio.run(collect(app))


def test_error_after_the_response_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Receive, send: Send) -> None:
        await send(start(500))
        await send(body(b"sorry", more=False))
        raise RuntimeError("the cause")

    assert asyncio.run(collect(app)) == [HttpHead(500, ()), b"sorry"]
    assert "after its response was complete" in caplog.text
