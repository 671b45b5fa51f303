# SPDX-License-Identifier: Apache-2.0
"""The policies that ship with vToken. A new one is a file here and a line below."""

from collections.abc import Callable

from vtoken.policies.h2o import H2O
from vtoken.policies.keep_all import KeepAll
from vtoken.policies.key_diff import KeyDiff
from vtoken.policies.key_norm import KeyNorm
from vtoken.policies.random import Random
from vtoken.policies.scissorhands import Scissorhands
from vtoken.policies.snapkv import SnapKV
from vtoken.policies.streaming_llm import StreamingLLM
from vtoken.policies.tova import TOVA
from vtoken.policy import Policy

POLICIES: dict[str, Callable[..., Policy]] = {
    "h2o": H2O,
    "keep_all": KeepAll,
    "key_diff": KeyDiff,
    "key_norm": KeyNorm,
    "random": Random,
    "scissorhands": Scissorhands,
    "snapkv": SnapKV,
    "streaming_llm": StreamingLLM,
    "tova": TOVA,
}
