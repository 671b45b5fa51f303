"""Hundreds of requests over HTTP, cut off and reset at bad moments, leave nothing behind.

The server is vLLM's own module, without Ray: `python -m vllm.entrypoints.openai.api_server`.
The invariants are checked by the server itself (VTOKEN_CHECK=1): one violation ends it.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from soak.server import AT_ONCE, NUM_BLOCKS, TICK, soak_server

pytestmark = pytest.mark.engine

REQUESTS = 640
KEEPERS = range(200, 240)
POLICIES: tuple[dict[str, Any], ...] = (
    {},
    {"vtoken.policy": "streaming_llm", "vtoken.budget_tokens": 96},
    {"vtoken.policy": "random", "vtoken.keep_ratio": 0.5, "vtoken.seed": 7},
    {"vtoken.policy": "keep_all"},
)


async def _tokens_so_far(answer: httpx.Response) -> AsyncIterator[int]:
    """Completion tokens at each event. Not by lines: the model's text may hold line separators."""
    rest = b""
    async for piece in answer.aiter_bytes():
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):
                yield json.loads(event.removeprefix(b"data: "))["usage"]["completion_tokens"]


class Load:
    """Clients that behave badly, by a fixed seed."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.random = random.Random(0)
        self.outcomes: Counter[str] = Counter()
        self.sent = 0
        self.leads = range(1, 4)
        self.client = httpx.AsyncClient(base_url=url, timeout=300)

    def body(self, number: int) -> dict[str, Any]:
        rng = self.random
        head = [5 + i % 190 for i in range(96)] if number % 3 == 0 else []
        tail = [5 + rng.randrange(190) for _ in range(rng.randrange(20, 90))]
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": head + tail,
            "max_tokens": rng.randrange(120, 420),
            "temperature": 0,
            "ignore_eos": True,
        }
        body["vllm_xargs"] = POLICIES[number % 4]
        if number in KEEPERS:
            # A stretch in which nobody evicts: vLLM admits by the prompt, and must preempt later.
            body |= {"vllm_xargs": POLICIES[3], "max_tokens": body["max_tokens"] + 300}
        return body

    async def one(self, number: int) -> None:
        body = self.body(number)
        if number % 5 < 3:
            await self.leave_early(body)
        elif number % 25 == 4:
            await self.malformed(body)
        else:
            answer = await self.client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            assert usage["completion_tokens"] == body["max_tokens"]
            assert usage["vtoken"]["policy"] == body["vllm_xargs"].get("vtoken.policy", "random")
            self.outcomes["finished"] += 1

    async def leave_early(self, body: dict[str, Any]) -> None:
        """Hang up right after a tick, when the request's plan is open, if it has one."""
        # With two outputs in flight, the step that opens a plan is scheduled two to three tokens
        # after the one that a client has seen.
        ticks = self.random.randrange(3, body["max_tokens"] // TICK + 1)
        wanted = ticks * TICK - self.random.choice(self.leads)
        usage = {"include_usage": True, "continuous_usage_stats": True}
        streamed = body | {"stream": True, "stream_options": usage}
        async with self.client.stream("POST", "/v1/completions", json=streamed) as answer:
            assert answer.status_code == 200
            async for seen in _tokens_so_far(answer):
                # One event may carry several tokens.
                if wanted <= seen < body["max_tokens"]:
                    self.outcomes["disconnected"] += 1
                    return
        self.outcomes["finished"] += 1

    async def malformed(self, body: dict[str, Any]) -> None:
        body["vllm_xargs"] = {"vtoken.policy": "random", "vtoken.keep_ratio": 7}
        answer = await self.client.post("/v1/completions", json=body)
        assert answer.status_code == 400
        assert "`vtoken.keep_ratio`" in answer.json()["error"]["message"]
        self.outcomes["refused"] += 1

    async def reset(self, everybody: bool) -> None:
        """Reset the prefix cache at any moment; ``everybody``: preempt all requests for it."""
        while True:
            await asyncio.sleep(0.5)
            answer = await self.client.post(
                "/reset_prefix_cache", params={"reset_running_requests": everybody}
            )
            assert answer.status_code == 200, answer.text
            # While requests hold blocks vLLM declines, as stock does; with preemption it never may.
            assert answer.json()["success"] or not everybody
            self.outcomes["reset with preemption" if everybody else "reset"] += 1

    async def run(self, numbers: range, everybody: bool) -> None:
        gate = asyncio.Semaphore(AT_ONCE)

        async def guarded(number: int) -> None:
            async with gate:
                await self.one(number)

        resets = asyncio.create_task(self.reset(everybody))
        async with asyncio.TaskGroup() as group:
            for number in numbers:
                group.create_task(guarded(number))
        resets.cancel()
        with suppress(asyncio.CancelledError):
            await resets

    async def run_all(self) -> int:
        """All requests; returns the preemptions that no reset asked for."""
        async with self.client:
            await self.run(range(REQUESTS), everybody=False)
            self.sent = REQUESTS
            # How far a client lags behind the engine depends on the machine: go on, at any lag,
            # until enough of them have hit an open plan.
            self.leads = range(TICK)
            while (await self.status())["plans_aborted"].get("aborted", 0) < 50:
                assert self.sent < 4 * REQUESTS, "hardly any client hits an open plan"
                await self.run(range(self.sent, self.sent + 100), everybody=False)
                self.sent += 100
            preemptions = (await self.status())["preemptions"]
            await self.run(range(self.sent, self.sent + AT_ONCE), everybody=True)
            self.sent += AT_ONCE
        return int(preemptions)

    async def status(self) -> Any:
        return (await self.client.get("/vtoken/status")).json()


def test_hundreds_of_bad_clients_leave_the_pool_as_it_was(tmp_path: Path) -> None:
    with soak_server(tmp_path) as server:
        check_bad_clients(server)


def check_bad_clients(server: str) -> None:
    before = httpx.get(f"{server}/vtoken/status").json()
    assert before["blocks_free"] == before["blocks_total"] == NUM_BLOCKS
    load = Load(server)
    preemptions = asyncio.run(load.run_all())
    deadline = time.monotonic() + 30
    while True:
        after = httpx.get(f"{server}/vtoken/status").json()
        if after["requests_running"] + after["requests_waiting"] == 0:
            break
        assert time.monotonic() < deadline, after
        time.sleep(0.2)
    print(dict(load.outcomes), after)
    ended = sum(load.outcomes[kind] for kind in ("finished", "disconnected", "refused"))
    assert ended == load.sent >= REQUESTS + AT_ONCE
    assert after["blocks_free"] == NUM_BLOCKS
    assert after["tokens_live"] == after["tokens_dead_resident"] == 0
    assert after["plans_committed"] >= 500
    assert after["plans_aborted"]["aborted"] >= 50
    assert preemptions >= 20
    assert load.outcomes["reset"] > 0 and load.outcomes["reset with preemption"] > 0
    assert load.outcomes["disconnected"] >= 20
    assert not {"refused", "diverged"} & set(after["plans_aborted"])
    opened = after["plans_committed"] + sum(after["plans_aborted"].values())
    assert after["plans_prepared"] == opened
