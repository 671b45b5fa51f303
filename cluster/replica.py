# SPDX-License-Identifier: Apache-2.0
"""The deployment whose replicas hold one engine each."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from ray import serve

from cluster.bridge import HttpHead, HttpRequest, exchange
from cluster.settings import AppSettings


@dataclass(frozen=True)
class Page:
    """What one replica answered to a GET."""

    replica: str
    status: int
    body: bytes


class VTokenReplica:
    """One engine and vLLM's app in front of it. Serve makes it, watches it and stops it."""

    async def __init__(self, settings: AppSettings) -> None:  # type: ignore[misc]  # Serve awaits it
        # Imported here: the processes that only build the application or route to it need no vLLM.
        from worker.facade import EngineFacade

        self._engine = await EngineFacade.start(settings.engine_args(), settings.options)

    async def answer(self, request: HttpRequest) -> AsyncGenerator[HttpHead | bytes, None]:
        """Yield the head, then the body. Cancelling the call aborts the request in the engine."""
        async for item in exchange(self._engine.app, request):
            yield item

    async def page(self, path: str) -> Page:
        """Answer a GET in one piece."""
        status, body = 0, b""
        async for item in exchange(self._engine.app, HttpRequest("GET", path, b"", (), b"")):
            if isinstance(item, HttpHead):
                status = item.status
            else:
                body += item
        return Page(serve.get_replica_context().replica_tag, status, body)

    async def check_health(self) -> None:
        """Serve calls this; a dead engine raises, and Serve replaces the replica."""
        await self._engine.check_health()

    async def __del__(self) -> None:
        """Serve awaits this as its destructor when the replica has drained."""
        await self._engine.close()
