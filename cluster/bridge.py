# SPDX-License-Identifier: Apache-2.0
"""Carries one HTTP exchange to an ASGI app in another process.

The front door packs a request into an `HttpRequest` and sends it to a replica; there `exchange`
runs the replica's ASGI app on it and yields an `HttpHead`, then the body in pieces. Neither side
reads the body, so the OpenAI protocol stays with the app. Needs neither Ray nor vLLM.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

logger = logging.getLogger(__name__)

Headers = tuple[tuple[bytes, bytes], ...]
Message = MutableMapping[str, Any]
AsgiApp = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]

# They describe one connection, not the message (RFC 9110, section 7.6.1).
HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
# How long an app may take to notice that its client left before it is cancelled.
GRACE_S = 5.0

# Exchanges whose client left, until their app has ended: asyncio keeps no reference to a task.
_abandoned: set[asyncio.Task[None]] = set()


@dataclass(frozen=True)
class HttpRequest:
    """A whole request; `path` is decoded, `query` is raw, header names are lower case."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes


@dataclass(frozen=True)
class HttpHead:
    """Status and headers of a response, sent before any of its body."""

    status: int
    headers: Headers


class _Exchange:
    """The ASGI server's side of one request: `receive` and `send` as the app sees them."""

    def __init__(self, request: HttpRequest) -> None:
        self._request = request
        self._body_read = False
        self._sent: asyncio.Queue[Message | None] = asyncio.Queue()
        self._client_left = asyncio.Event()

    async def run(self, app: AsgiApp) -> None:
        """Run the app to its end; `next_messages` returns nothing after that."""
        try:
            await app(_scope(self._request), self._receive, self._send)
        finally:
            self._sent.put_nowait(None)

    async def next_messages(self) -> list[Message]:
        """Wait for the app to send; return all that it has sent, or [] once it ended.

        Taking all at once joins the tokens that pile up while the network is slower than the
        engine.
        """
        messages = [await self._sent.get()]
        while messages[-1] is not None and not self._sent.empty():
            messages.append(self._sent.get_nowait())
        if messages[-1] is None and len(messages) > 1:
            self._sent.put_nowait(None)  # the end is reported by the next call
        return [message for message in messages if message is not None]

    def abandon(self, app: asyncio.Task[None]) -> None:
        """Tell the app that the client left, and cancel it if it does not end soon.

        Telling comes first: an app may run its work in a task that a cancellation of its own
        task does not reach, as vLLM does for responses that do not stream.
        """
        self._client_left.set()
        if app.done():
            return
        _abandoned.add(app)
        timer = asyncio.get_running_loop().call_later(GRACE_S, app.cancel)

        def forget(done: asyncio.Task[None]) -> None:
            timer.cancel()
            _abandoned.discard(done)

        app.add_done_callback(forget)

    async def _receive(self) -> Message:
        """The body once, then nothing until the client leaves."""
        if not self._body_read:
            self._body_read = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        await self._client_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self._sent.put_nowait(message)


async def exchange(app: AsgiApp, request: HttpRequest) -> AsyncGenerator[HttpHead | bytes, None]:
    """Run `app` on `request`; yield its `HttpHead`, then its body in non-empty pieces.

    Closing or cancelling the generator is how a client leaves: the app then receives
    `http.disconnect`. Raises what the app raises before its response is complete; what it raises
    afterwards no longer concerns the client and is logged.
    """
    side = _Exchange(request)
    task = asyncio.ensure_future(side.run(app))
    complete = False
    try:
        while messages := await side.next_messages():
            complete = _ends_response(messages[-1])
            for item in _items(messages):
                yield item
    finally:
        side.abandon(task)
    if error := task.exception():
        if not complete:
            raise error
        logger.error("the app failed after its response was complete", exc_info=error)


def _ends_response(message: Message) -> bool:
    return message["type"] == "http.response.body" and not message.get("more_body", False)


def _items(messages: list[Message]) -> list[HttpHead | bytes]:
    items: list[HttpHead | bytes] = [
        HttpHead(message["status"], end_to_end(message.get("headers", ())))
        for message in messages
        if message["type"] == "http.response.start"
    ]
    body = b"".join(
        message.get("body", b"") for message in messages if message["type"] == "http.response.body"
    )
    return [*items, body] if body else items


def end_to_end(headers: Any) -> Headers:
    """The headers that go on to the next hop, names in lower case."""
    lowered = ((bytes(name).lower(), bytes(value)) for name, value in headers)
    return tuple((name, value) for name, value in lowered if name not in HOP_BY_HOP)


def _scope(request: HttpRequest) -> Message:
    return {
        "type": "http",
        # Below 2.4 Starlette listens for the disconnect message; from 2.4 on it waits for `send`
        # to fail, which ours never does.
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": quote(request.path).encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": list(request.headers),
        "client": None,
        "server": None,
        "state": {},
    }
