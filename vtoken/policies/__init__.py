# SPDX-License-Identifier: Apache-2.0
"""The policies that ship with vToken. A new one is a file here and a line below."""

from collections.abc import Callable

from vtoken.policies.keep_all import KeepAll
from vtoken.policies.random import Random
from vtoken.policies.streaming_llm import StreamingLLM
from vtoken.policy import Policy

POLICIES: dict[str, Callable[..., Policy]] = {
    "keep_all": KeepAll,
    "random": Random,
    "streaming_llm": StreamingLLM,
}
