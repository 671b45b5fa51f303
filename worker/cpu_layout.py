# SPDX-License-Identifier: Apache-2.0
"""Where CPU attention puts each element of K and V inside a block.

The layout of K depends on the instruction set and is not documented. It is learnt exactly: known
patterns go through vLLM's own write kernel into a scratch block and are read back.
Shape letters: H kv heads, S tokens a block, D head size.
"""

import torch
from vllm._custom_ops import cpu_attn_reshape_and_cache
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vtoken.errors import UnsupportedError

_INTEGERS = {2: torch.int16, 4: torch.int32}


def learn_layout(
    dtype: torch.dtype, block_size: int, head_size: int, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(K index, V index), int64 ``[S, D]`` each: the place of element (slot, channel) among the
    S * D elements of its half of a (block, head).

    Raises:
        UnsupportedError: the kernel does not permute elements within a (block, head).
    """
    shape = (dtype, block_size, head_size, num_kv_heads)
    return _learn_half(shape, 0), _learn_half(shape, 1)


def _learn_half(shape: tuple[torch.dtype, int, int, int], half: int) -> torch.Tensor:
    _, size, head_size, num_kv_heads = shape
    slots = torch.arange(size)[:, None].expand(size, head_size)
    channels = torch.arange(head_size)[None, :].expand(size, head_size)
    # Two patterns of small integers, so that 16-bit elements are wide enough for any block.
    slot_at = _write_and_read(shape, half, slots)
    channel_at = _write_and_read(shape, half, channels)
    for found in (slot_at, channel_at):
        if not torch.equal(found, found[:1].expand(num_kv_heads, -1)):
            raise UnsupportedError("CPU attention lays heads out differently from each other")
    origin = slot_at[0] * head_size + channel_at[0]
    index = torch.empty(size * head_size, dtype=torch.long)
    index[origin] = torch.arange(size * head_size)
    if not torch.equal(origin.sort().values, torch.arange(size * head_size)):
        raise UnsupportedError("CPU attention does not permute the elements of a block")
    return index.view(size, head_size)


def _write_and_read(
    shape: tuple[torch.dtype, int, int, int], half: int, pattern_SD: torch.Tensor
) -> torch.Tensor:
    """int64 ``[H, S * D]``: the pattern as it lies in a scratch block's K (0) or V (1) half."""
    dtype, size, head_size, num_kv_heads = shape
    integer = _INTEGERS.get(dtype.itemsize)
    if integer is None:
        raise UnsupportedError(f"KV cache of {dtype}: only 2- and 4-byte types are supported")
    block = torch.zeros(1, num_kv_heads, 2 * size, head_size, dtype=dtype)
    key_cache, value_cache = block.chunk(2, dim=2)
    pattern = pattern_SD.to(integer)[:, None, :].expand(size, num_kv_heads, head_size)
    written = pattern.contiguous().view(dtype)
    zeros = torch.zeros_like(written)
    key, value = (written, zeros) if half == 0 else (zeros, written)
    isa = _get_attn_isa(dtype, size, head_size)
    cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, torch.arange(size), isa)
    halves = block.view(integer).view(num_kv_heads, 2, size * head_size)
    return halves[:, half].long()
