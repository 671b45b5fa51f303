# SPDX-License-Identifier: Apache-2.0
"""A tiny Llama with random weights, made on the spot: for tests and for benchmarks of mechanics.

Its text means nothing, but it depends on every token of the context, which vLLM's dummy weights do
not give. Nothing is downloaded.
"""

from pathlib import Path
from typing import Any

_SEED = 20
_PAD, _BEGIN, _END = "<|pad|>", "<|im_start|>", "<|im_end|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_model(path: Path) -> Path:
    """Write the model and its tokenizer to ``path`` and return it.

    Two layers, 4 query and 2 KV heads of size 32 (the smallest that vLLM's CPU attention takes),
    4,096 positions, float32. The vocabulary is the 256 bytes and three special tokens. Two calls
    write the same weights; the random state of the caller is untouched. The model may emit its end
    token at any step: pass ``ignore_eos`` where a test needs a length.
    """
    import torch
    from transformers import LlamaForCausalLM

    tokenizer = _byte_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = LlamaForCausalLM(_config(tokenizer))
    model.to(torch.float32).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _config(tokenizer: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        # With transformers' 0.02 attention is flat, and the output hardly depends on the context.
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _byte_tokenizer() -> Any:
    """Return a tokenizer with one token per byte, so any text goes in and out unchanged."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END,
        pad_token=_PAD,
        additional_special_tokens=[_BEGIN],
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast
