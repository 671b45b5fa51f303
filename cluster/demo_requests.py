# SPDX-License-Identifier: Apache-2.0
"""The demo's work: eight chat requests sent at once, and what came back."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any
from urllib.request import Request, urlopen

from prometheus_client.parser import text_string_to_metric_families

NUM_TOKENS = 600
TIMEOUT_S = 300.0
PROGRESS_S = 5.0

# About 400 tokens that half of the requests share.
SHARED_TEXT = """\
The harbour museum stands where the old customs house used to be, at the end of the stone pier. \
For two hundred years every ship that entered the bay had to stop there, so that an officer could \
count the barrels and write their number into a heavy green book. Forty-one of these books have \
survived. They are the reason why the museum exists, because they do not only speak of wine and \
salt and timber. The officers were bored, and in the margins they wrote down what they saw: which \
captain had a new coat, which sailor could not find his way back to his ship, how high the water \
stood in the winter of the great storm, and how a tame fox once came ashore with a load of furs \
and lived under the stairs for nine years. The first director of the museum, a retired teacher \
named Elena Marsh, read all forty-one books in four years. She copied each note onto a small card \
and sorted the cards by subject, and so she found out that the fox appears in the hand of three \
different officers, while the storm appears only in one. From this she concluded that the storm \
was probably an invention, and she said so in a lecture that made many people in the town angry, \
since their grandparents had told them about it. The quarrel lasted for a decade. It ended when \
workers who were repairing the foundations of the lighthouse found a line cut into the rock, far \
above the highest tide, with the date of the storm beside it and the words: here stood the sea. \
Elena Marsh came to look at the line, laid her hand on it, and wrote a last card. It says that a \
thing may be true although only one person took the trouble to write it down. The card hangs today \
in the entrance hall, under glass, next to a drawing of the fox. Visitors ask about the fox first. \
Only on the way out do some of them stop, read the card again, and look across the water.\
"""
QUESTIONS = (
    "Retell this story for a child of six.",
    "Who was Elena Marsh, and what did she learn?",
    "Describe the museum to a traveller who is planning a visit.",
    "Write the speech with which the line in the rock was presented to the town.",
)
SHORT_PROMPTS = (
    "Tell me a long story about a sailor and a lighthouse.",
    "Explain step by step how bread is baked, and why each step matters.",
    "Describe a walk through a forest in autumn in great detail.",
    "Explain how a bicycle works to somebody who has never seen one.",
)


@dataclass(frozen=True)
class Reply:
    """One answer; `eviction` is what `usage["vtoken"]` says, None from a stock server."""

    prompt_tokens: int
    completion_tokens: int
    text: str
    eviction: dict[str, Any] | None

    @property
    def stored_tokens(self) -> int:
        """Tokens whose K/V was computed: all but the last, which nothing was asked after."""
        return self.prompt_tokens + self.completion_tokens - 1


def conversations() -> list[list[dict[str, str]]]:
    """Four conversations behind the shared text and four without it, alternating."""
    pairs = zip(QUESTIONS, SHORT_PROMPTS, strict=True)
    return [
        [{"role": "user", "content": content}]
        for question, short in pairs
        for content in (f"{SHARED_TEXT}\n\n{question}", short)
    ]


def send_all(url: str, progress: Callable[[int, float], None]) -> tuple[list[Reply], float]:
    """Send all conversations at once; return the replies in order, and the seconds they took.

    `progress` is called every few seconds with the tokens generated so far and the time.
    """
    before = read_metric(url, "vllm:generation_tokens_total")
    start = time.monotonic()
    with ThreadPoolExecutor(max_workers=len(conversations())) as pool:
        futures = [pool.submit(_send, url, messages) for messages in conversations()]
        pending = set(futures)
        while pending:
            _, pending = wait(pending, timeout=PROGRESS_S)
            if pending:
                tokens = read_metric(url, "vllm:generation_tokens_total") - before
                progress(int(tokens), time.monotonic() - start)
        seconds = time.monotonic() - start
        return [future.result() for future in futures], seconds


def read_metric(url: str, name: str) -> float:
    """The sum of a metric's samples on the server's page; raises KeyError when it has none."""
    with urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as response:
        text = response.read().decode()
    values = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    ]
    if not values:
        raise KeyError(f"{url}/metrics has no {name}")
    return sum(values)


def _send(url: str, messages: list[dict[str, str]]) -> Reply:
    body = {
        "messages": messages,
        "max_tokens": NUM_TOKENS,
        "min_tokens": NUM_TOKENS,
        "temperature": 0,
    }
    request = Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urlopen(request, timeout=TIMEOUT_S) as response:
        answer = json.load(response)
    usage = answer["usage"]
    return Reply(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        text=answer["choices"][0]["message"]["content"],
        eviction=usage.get("vtoken"),
    )
