# SPDX-License-Identifier: Apache-2.0
"""The tiny model: the same each time, and sensitive to its whole context."""

from pathlib import Path

import pytest

from worker.tiny_model import tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def test_the_tiny_model_is_the_same_every_time(tiny: Path, tmp_path: Path) -> None:
    import torch

    before = torch.random.get_rng_state()
    again = tiny_model(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)
    names = ["model.safetensors", "config.json", "tokenizer.json"]
    assert [(again / n).read_bytes() for n in names] == [(tiny / n).read_bytes() for n in names]


def test_the_output_of_the_tiny_model_depends_on_every_token(tiny: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny)
    prompt = torch.arange(64).remainder(256).unsqueeze(0)
    changed = prompt.repeat(64, 1)
    changed.fill_diagonal_(200)
    with torch.no_grad():
        first = model(prompt).logits[0, -1].log_softmax(-1)
        others = model(changed).logits[:, -1].log_softmax(-1)
    assert (others - first).abs().amax(-1).min() > 1e-2


def test_the_tiny_tokenizer_returns_any_text_unchanged(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = "def f(x):\n\treturn 12.5  # \x00 naïve ☃"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer("<|im_end|>")["input_ids"] == [tokenizer.eos_token_id]
