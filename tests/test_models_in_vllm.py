# SPDX-License-Identifier: Apache-2.0
"""Stock vLLM loads both models of this project, completes a text and chats."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from worker.model import default_model
from worker.tiny_model import tiny_model

pytestmark = pytest.mark.engine

# A process of its own: vLLM reads this environment when it is imported, and keeps its state.
CHAT = """
import sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(
        sys.argv[1],
        enforce_eager=True,
        dtype="float32",
        block_size=32,
        max_model_len=1024,
        kv_cache_memory_bytes=256 << 20,
    )
    greedy = SamplingParams(temperature=0, max_tokens=16)
    chat = llm.chat([{"role": "user", "content": "What is the capital of France?"}], greedy)
    text = llm.generate(["The three primary colours are"], greedy)
    print("CHAT", ascii(chat[0].outputs[0].text))
    print("TEXT", len(text[0].outputs[0].token_ids))
"""


ANSWERS = ("CHAT", "TEXT")


def chat_in_vllm(model: Path, folder: Path) -> dict[str, str]:
    script = folder / "chat.py"
    script.write_text(CHAT)
    environ = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
    }
    done = subprocess.run(
        [sys.executable, str(script), str(model)],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if line[:4] in ANSWERS)


def test_vllm_chats_with_the_tiny_model(tmp_path: Path) -> None:
    answers = chat_in_vllm(tiny_model(tmp_path / "tiny"), tmp_path)
    assert set(answers) == set(ANSWERS)


def test_vllm_gets_a_right_answer_from_the_default_model(tmp_path: Path) -> None:
    answers = chat_in_vllm(default_model(), tmp_path)
    assert answers["CHAT"] == "'The capital of France is Paris.'"
    assert answers["TEXT"] == "16"
