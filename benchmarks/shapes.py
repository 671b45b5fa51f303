# SPDX-License-Identifier: Apache-2.0
"""Model shapes with dummy weights: enough where memory and speed are measured, not content.

Where a policy looks at attention, a shape is the folder of a real model instead.
"""

import json
from pathlib import Path
from typing import Any

LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
MISTRAL_7B_V0_3 = LLAMA_3_1_8B | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Two layers, for a look at a benchmark's own working on any machine.
TINY = LLAMA_3_1_8B | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES = {"llama-3.1-8b": LLAMA_3_1_8B, "mistral-7b-v0.3": MISTRAL_7B_V0_3, "tiny": TINY}


def is_real(shape: str) -> bool:
    """Whether this is the folder of a model with weights and a tokenizer."""
    return Path(shape).is_dir()


def write_model(shape: str, directory: Path) -> str:
    """A folder that vLLM loads, with ``load_format="dummy"`` unless it is a real model's."""
    if is_real(shape):
        return shape
    config, content = directory / "config.json", json.dumps(SHAPES[shape], indent=1)
    if not config.exists() or config.read_text() != content:  # somebody may be reading it
        directory.mkdir(parents=True, exist_ok=True)
        config.write_text(content)
    return str(directory)
