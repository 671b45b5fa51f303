# SPDX-License-Identifier: Apache-2.0
"""The front door: takes HTTP from Serve's proxy and passes it to a replica.

It reads no body and knows no OpenAI type. It answers by itself only what no replica can: a path
that is not served, a full queue, a replica that died.
"""

import json
from collections.abc import AsyncGenerator
from typing import Any

import prometheus_client
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)
from ray.serve.handle import DeploymentHandle

from cluster.bridge import HttpHead, HttpRequest, end_to_end
from cluster.errors import openai_error
from cluster.exposition import join_pages
from cluster.replica import Page

METHODS = ["GET", "HEAD", "POST", "DELETE", "OPTIONS"]
UNAVAILABLE = (RayActorError, DeploymentUnavailableError, ReplicaUnavailableError)
RETRY_AFTER_S = 1.0

# The API's own description is vLLM's, not this app's.
front = FastAPI(openapi_url=None)


# Above the class: `serve.ingress` copies the app and the globals that it uses when it is applied.
def _unavailable() -> Response:
    return openai_error(503, "no replica is available", retry_after_s=RETRY_AFTER_S)


async def _body(items: Any) -> AsyncGenerator[bytes, None]:
    """The rest of a replica's answer; leaving early cancels the call in the replica."""
    try:
        async for item in items:
            yield item
    finally:
        items.cancel()


@serve.ingress(front)
class FrontDoor:
    """Ingress deployment; holds no state but the handle to the replicas."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas
        self._streaming = replicas.options(stream=True)

    @front.get("/metrics")
    async def metrics(self) -> Response:
        """Every replica's metrics, each sample labelled with its replica."""
        pages = [page for page in await self._ask_all("/metrics") if page.status == 200]
        if not pages:
            return _unavailable()
        text = join_pages({page.replica: page.body.decode() for page in pages})
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    @front.get("/vtoken/status")
    async def status(self) -> Response:
        """`{"replicas": [...]}`: the status of every replica, with its name."""
        pages = await self._ask_all("/vtoken/status")
        if not pages:
            return _unavailable()
        if any(page.status == 404 for page in pages):
            return openai_error(404, "these replicas run stock vLLM, without vToken")
        statuses = [{"replica": page.replica, **json.loads(page.body)} for page in pages]
        return JSONResponse({"replicas": statuses})

    @front.api_route("/health", methods=["GET", "HEAD"])
    @front.api_route("/v1/{rest:path}", methods=METHODS)
    async def forward(self, request: Request) -> Response:
        """Pass one request to one replica and stream its answer back."""
        packed = HttpRequest(
            method=request.method,
            path=request.scope["path"],
            query=request.scope["query_string"],
            headers=end_to_end(request.scope["headers"]),
            body=await request.body(),
        )
        try:
            items = self._streaming.answer.remote(packed)
            head = await anext(items)
        except BackPressureError as error:
            return openai_error(429, str(error), retry_after_s=RETRY_AFTER_S)
        except UNAVAILABLE:
            return _unavailable()
        except RayTaskError:
            return openai_error(500, "the replica failed; its log has the reason")
        assert isinstance(head, HttpHead), "a replica sends the head first"
        response = StreamingResponse(_body(items), status_code=head.status)
        response.raw_headers = list(head.headers)
        return response

    @front.api_route("/{rest:path}", methods=METHODS)
    async def unknown(self, rest: str) -> Response:
        """Everything else is no part of the API."""
        return openai_error(404, f"there is no /{rest} here")

    async def _ask_all(self, path: str) -> list[Page]:
        """What each replica answers to a GET; one that is ending is left out."""
        try:
            call = self._replicas.broadcast("page", path)
            results = await call.results_async(return_exceptions=True)
        except UNAVAILABLE:
            return []
        return [result for result in results if isinstance(result, Page)]
