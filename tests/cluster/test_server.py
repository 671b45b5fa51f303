# SPDX-License-Identifier: Apache-2.0
"""One real `vtoken serve`: Ray Serve, two hops, a vLLM engine, a tiny model, over HTTP."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from cluster.demo_requests import read_metric
from worker.tiny_model import tiny_model

pytestmark = pytest.mark.engine

START_S = 300
STOP_S = 60
MAX_MODEL_LEN = 1024
# Long enough that no test meets its end by accident, and stopped by every test that starts it.
ENDLESS = {"prompt": "x", "max_tokens": 1000, "min_tokens": 1000, "ignore_eos": True}
EVICTION = ["--policy", "random", "--keep-ratio", "0.5", "--reclaim", "eager"]
# Six requests at a time in all, so that a test can fill the server.
LIMITS = ["--max-ongoing-requests", "4", "--max-queued-requests", "2", "--drain", "2"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server's base URL. Afterwards it has stopped by itself and left no process."""
    folder = tmp_path_factory.mktemp("server")
    model = str(tiny_model(folder / "tiny"))
    sizes = ["--num-gpu-blocks", "256", "--max-model-len", str(MAX_MODEL_LEN)]
    where = ["--host", "127.0.0.1", "--port", str(free_port())]
    command = [str(Path(sys.executable).with_name("vtoken")), "serve", "--model", model]
    with (folder / "log").open("w+") as log:
        server = subprocess.Popen(
            [*command, *sizes, *where, *EVICTION, *LIMITS], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            yield wait_for_url(server, folder / "log")
        finally:
            started = psutil.Process(server.pid).children(recursive=True)
            server.send_signal(signal.SIGINT)
            status = server.wait(STOP_S)
            left = [process for process in started if is_alive(process)]
    assert status == 0, (folder / "log").read_text()
    assert left == []


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for_url(server: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for line in log.read_text().splitlines():
            if line.startswith("ready: curl "):
                return line.split()[2].removesuffix("/v1/chat/completions")
        if server.poll() is not None:
            pytest.fail(f"vtoken serve ended:\n{log.read_text()}")
        time.sleep(0.2)
    pytest.fail(f"vtoken serve is not ready after {START_S} s:\n{log.read_text()}")


def post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, timeout=120)


def complete(url: str, **body: Any) -> httpx.Response:
    return post(url, "/v1/completions", {"temperature": 0, "ignore_eos": True, **body})


def status_of(url: str) -> dict[str, Any]:
    (status,) = httpx.get(f"{url}/vtoken/status", timeout=30).json()["replicas"]
    return dict(status)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"not within 30 s: {what}"
        time.sleep(0.1)


def assert_error(response: httpx.Response, status: int, words: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == status
    assert isinstance(error["type"], str)
    assert words in error["message"]


def test_health_and_models(url: str) -> None:
    assert httpx.get(f"{url}/health").status_code == 200
    models = httpx.get(f"{url}/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("tiny", MAX_MODEL_LEN)]


def test_completion_says_in_usage_what_was_evicted(url: str) -> None:
    answer = complete(url, prompt="a" * 200, max_tokens=200, min_tokens=200).json()
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (200, 200)
    report = usage["vtoken"]
    assert report["policy"] == "random"
    assert report["tokens_evicted"] > 100
    assert report["blocks_given_back"] > 0
    assert 0 < report["blocks_held"] < 400 // 32
    assert answer["kv_transfer_params"] is None


def test_chat_answers(url: str) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 8, "ignore_eos": True}
    answer = post(url, "/v1/chat/completions", body).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["vtoken"]["tokens_evicted"] == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_stream_is_the_answer_in_pieces_with_usage_last(url: str, path: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "b"}]} if "chat" in path else {"prompt": "b"}
    body = {**prompt, "max_tokens": 200, "min_tokens": 200, "temperature": 0, "ignore_eos": True}
    whole = post(url, path, body).json()["choices"][0]
    streaming = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{url}{path}", json=streaming, timeout=120) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    *chunks, last = map(json.loads, events[:-1])
    choices = [chunk["choices"][0] for chunk in chunks]
    if "chat" in path:
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        assert text == whole["message"]["content"]
    else:
        assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert len(chunks) > 20
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 200
    assert last["usage"]["vtoken"]["tokens_evicted"] > 0


def test_request_may_choose_its_own_eviction(url: str) -> None:
    xargs = {"vtoken.policy": "keep_all"}
    usage = complete(url, prompt="c" * 200, max_tokens=100, vllm_xargs=xargs).json()["usage"]
    assert (usage["vtoken"]["policy"], usage["vtoken"]["tokens_evicted"]) == ("keep_all", 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"model": "nobody"}, 404, "`nobody` does not exist"),
        ({"prompt": "d" * (MAX_MODEL_LEN + 1)}, 400, "maximum context length"),
        ({"vllm_xargs": {"vtoken.policy": "h3o"}}, 400, "'h3o' is unknown"),
        ({"vllm_xargs": {"vtoken.budget_tokens": 3}}, 400, "raise it to at least"),
        ({"vllm_xargs": {"vtoken.polici": "random"}}, 400, "is not an option"),
    ],
)
def test_wrong_request_is_an_openai_error(
    url: str, body: dict[str, Any], status: int, words: str, stream: bool
) -> None:
    assert_error(complete(url, **{"prompt": "e", "stream": stream, **body}), status, words)


def test_bad_json_and_unknown_path_are_openai_errors(url: str) -> None:
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{url}/v1/chat/completions", content=b"{no", headers=headers)
    assert_error(response, 400, "JSON")
    assert_error(httpx.get(f"{url}/nowhere"), 404, "/nowhere")


def test_metrics_hold_vtokens_and_vllms_with_the_replica(url: str) -> None:
    text = httpx.get(f"{url}/metrics").text
    status = status_of(url)
    assert f'vtoken_blocks{{replica="{status["replica"]}",state="total"}}' in text
    assert read_metric(url, "vtoken_blocks_given_back_total") == status["blocks_given_back"] > 0
    assert read_metric(url, "vtoken_moved_tokens_total") == status["tokens_moved"] > 0
    assert read_metric(url, "vllm:generation_tokens_total") > 0
    assert 0 < read_metric(url, "kv_peak_blocks_in_use") <= status["peak_blocks_used"]


def test_status_has_the_options_and_no_blocks_in_use_at_rest(url: str) -> None:
    wait_until(lambda: status_of(url)["requests_running"] == 0, "no request runs")
    status = status_of(url)
    assert status["options"]["policy"] == "random"
    assert status["options"]["keep_ratio"] == 0.5
    assert status["blocks_free"] == status["blocks_total"]


def test_leaving_a_stream_aborts_it_in_the_engine(url: str) -> None:
    body = {**ENDLESS, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
        lines = response.iter_lines()  # kept: httpx closes the response with its iterator
        next(lines)
        assert status_of(url)["requests_running"] == 1
    assert_aborted(url)


def test_leaving_an_answer_that_does_not_stream_aborts_it(url: str) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=ENDLESS, timeout=0.5)
    assert_aborted(url)


def assert_aborted(url: str) -> None:
    wait_until(lambda: status_of(url)["requests_running"] == 0, "the request is aborted")
    tokens = read_metric(url, "vllm:generation_tokens_total")
    time.sleep(0.5)
    assert read_metric(url, "vllm:generation_tokens_total") == tokens
    assert status_of(url)["blocks_free"] == status_of(url)["blocks_total"]


def test_full_server_answers_429_and_serves_the_others(url: str) -> None:
    body = {**ENDLESS, "max_tokens": 300, "min_tokens": 300}
    with ThreadPoolExecutor(12) as pool:
        responses = list(pool.map(lambda _: post(url, "/v1/completions", body), range(12)))
    refused = [response for response in responses if response.status_code != 200]
    # Six fit. Serve counts a request as queued until a replica has accepted it, so a burst may
    # fill the queue before the first one has got through; the queue itself is always served.
    assert 0 < len(refused) <= 10
    for response in refused:
        assert_error(response, 429, "backpressure")
        assert response.headers["retry-after"] == "1"
