# SPDX-License-Identifier: Apache-2.0
"""vLLM's own server on a GPU with the plugin, over HTTP: the engine in a process of its own, with
CUDA graphs, and more requests than the pool holds. The server checks its invariants itself."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from soak.server import AT_ONCE, NUM_BLOCKS, soak_server

pytestmark = pytest.mark.gpu

REQUESTS = 3 * AT_ONCE


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with soak_server(tmp_path_factory.mktemp("server"), on_gpu=True) as url:
        yield url


def ask(url: str, number: int) -> dict[str, Any]:
    body = {
        "model": "tiny",
        "prompt": [5 + (number * 37 + i * 11) % 190 for i in range(200)],
        "max_tokens": 300,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


def test_every_answer_says_what_it_gave_back_and_the_pool_ends_free(url: str) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        usages = list(pool.map(lambda number: ask(url, number), range(REQUESTS)))
    assert all(usage["completion_tokens"] == 300 for usage in usages)
    assert min(usage["vtoken"]["blocks_given_back"] for usage in usages) >= 20
    assert sum(usage["vtoken"]["preemptions"] for usage in usages) == 0
    status = httpx.get(f"{url}/vtoken/status", timeout=60).json()
    assert status["blocks_free"] == status["blocks_total"] == 2 * NUM_BLOCKS
    assert status["plans_committed"] + status["holes_filled"] >= REQUESTS
    assert not {"refused", "diverged"} & set(status["plans_aborted"])


def test_a_wrong_option_is_refused_by_name(url: str) -> None:
    body = {"model": "tiny", "prompt": "a", "vllm_xargs": {"vtoken.polici": "random"}}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400 and "vtoken.polici" in answer.text
