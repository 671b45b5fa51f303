# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Triton kernels of the score probe. ``vtoken/measure.py`` says in plain torch what they compute.

``about`` holds six numbers for each measured request: where its tokens begin among the measured
ones, how many they are, its row of the query ring, its length, how many queries are known, and what
is wanted: a bit for each row of ``out``, in the order of ``Measure``. Other rows stay as they are.
"""
# ruff: noqa: PLR0913, PLR0917

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens_padded", "num_requests"])
def place_kernel(
    rows,  # int32 [requests]
    starts,  # int32 [requests + 1]
    positions,  # int64 [T]
    places,  # int64 [>= num_tokens_padded], written
    num_tokens_padded,
    trash,
    num_requests,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Where each token's query is kept. The last program throws the padding away."""
    request = tl.program_id(0)
    is_padding = request == num_requests
    start = tl.load(starts + request)
    end = tl.load(starts + tl.where(is_padding, 0, request + 1))
    end = tl.where(is_padding, num_tokens_padded, end)
    row = tl.load(rows + request, mask=request < num_requests, other=0).to(tl.int64)
    newest = tl.load(positions + end - 1, mask=request < num_requests, other=0)
    for first in range(start, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        inside = token < end
        position = tl.load(positions + token, mask=inside & (request < num_requests), other=0)
        kept = (position > newest - WINDOW) & (request < num_requests)
        place = tl.where(kept, row * WINDOW + position % WINDOW, trash)
        tl.store(places + token, place, mask=inside)


@triton.jit
def _load_keys(cache, slots, token, inside, head, stride_block, stride_head, stride_slot,
               SIZE: tl.constexpr, D: tl.constexpr, D_UP: tl.constexpr):  # fmt: skip
    """float32 [BLOCK, D_UP]: the keys of some tokens, 0 outside."""
    slot = tl.load(slots + token, mask=inside, other=0)
    at = (slot // SIZE) * stride_block + (slot % SIZE) * stride_slot + head * stride_head
    channel = tl.arange(0, D_UP)
    mask = inside[:, None] & (channel < D)[None, :]
    return tl.load(cache + at[:, None] + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _logits(query, key, scale, softcap, SOFTCAP: tl.constexpr):
    """float32 [WINDOW_UP, BLOCK]"""
    logits = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if SOFTCAP:
        # tanh by exp, which every backend has
        logits = softcap * (1 - 2 / (tl.exp(2 * logits / softcap) + 1))
    return logits


# What differs from step to step must not make variants, each compiled while requests wait.
VARYING = ["stride_out", "stride_out_layer", "stride_out_head"]
VARYING_STARTS = ["about", "slots", "positions"]


@triton.jit(
    do_not_specialize=["scale", "softcap", *VARYING], do_not_specialize_on_alignment=VARYING_STARTS
)
def attention_kernel(
    caches,  # uint64 [L]: address of each layer's cache
    queries,  # [L, rows * WINDOW + 1, H, D]
    about,  # int64 [requests, 6]
    slots,  # int64 [N]
    positions,  # int64 [N]
    out,  # float32 [3, L, H, N]: mean mass, last mass, low share
    stride_block, stride_head, stride_slot,
    stride_layer, stride_query, stride_query_head,
    stride_out, stride_out_layer, stride_out_head,
    scale, softcap,
    SIZE: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, WINDOW_UP: tl.constexpr,
    D: tl.constexpr, D_UP: tl.constexpr, BLOCK: tl.constexpr, SOFTCAP: tl.constexpr,
    LOW: tl.constexpr,
):  # fmt: skip
    """One request, layer and query head: softmax in two passes over its resident keys."""
    about += tl.program_id(0) * 6
    layer, head = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)  # times strides
    first, count = tl.load(about), tl.load(about + 1)
    row, length, known = tl.load(about + 2), tl.load(about + 3), tl.load(about + 4)
    wanted = tl.load(about + 5)
    index, channel = tl.arange(0, WINDOW_UP), tl.arange(0, D_UP)
    asked = length - known + index
    is_query = index < known
    place = row * WINDOW + asked % WINDOW
    at = layer * stride_layer + place * stride_query + head * stride_query_head
    mask = is_query[:, None] & (channel < D)[None, :]
    query = tl.load(queries + at[:, None] + channel[None, :], mask=mask, other=0.0)
    cache = tl.load(caches + layer).to(tl.pointer_type(queries.dtype.element_ty))
    top = tl.full((WINDOW_UP,), -1e30, tl.float32)
    total = tl.zeros((WINDOW_UP,), tl.float32)
    visible_keys = tl.zeros((WINDOW_UP,), tl.float32)
    for start in range(0, count, BLOCK):
        token = first + start + tl.arange(0, BLOCK)
        inside = token < first + count
        key = _load_keys(cache, slots, token, inside, head // GROUP,
                         stride_block, stride_head, stride_slot, SIZE, D, D_UP)  # fmt: skip
        position = tl.load(positions + token, mask=inside, other=0)
        seen = inside[None, :] & (position[None, :] <= asked[:, None])
        logits = tl.where(seen, _logits(query, key, scale, softcap, SOFTCAP), -1e30)
        higher = tl.maximum(top, tl.max(logits, 1))
        weights = tl.where(seen, tl.exp(logits - higher[:, None]), 0.0)
        total = total * tl.exp(top - higher) + tl.sum(weights, 1)
        visible_keys += tl.sum(seen.to(tl.float32), 1)
        top = higher
    blind = total == 0  # all that an old query saw may be gone
    top, total = tl.where(blind, 0.0, top), tl.where(blind, 1.0, total)
    num_queries = known.to(tl.float32)
    out += layer * stride_out_layer + head * stride_out_head
    for start in range(0, count, BLOCK):
        token = first + start + tl.arange(0, BLOCK)
        inside = token < first + count
        key = _load_keys(cache, slots, token, inside, head // GROUP,
                         stride_block, stride_head, stride_slot, SIZE, D, D_UP)  # fmt: skip
        position = tl.load(positions + token, mask=inside, other=0)
        seen = inside[None, :] & (position[None, :] <= asked[:, None]) & is_query[:, None]
        logits = _logits(query, key, scale, softcap, SOFTCAP)
        weights = tl.where(seen, tl.exp(logits - top[:, None]), 0.0)
        weights /= total[:, None]
        if (wanted & 1) != 0:
            tl.store(out + token, tl.sum(weights, 0) / num_queries, mask=inside)
        if (wanted & 2) != 0:
            newest = tl.where((index == known - 1)[:, None], weights, 0.0)
            tl.store(out + stride_out + token, tl.sum(newest, 0), mask=inside)
        if (wanted & 4) != 0:
            low = seen & (weights * visible_keys[:, None] < LOW)
            share = tl.sum(low.to(tl.float32), 0) / num_queries
            tl.store(out + 2 * stride_out + token, share, mask=inside)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=["about", "slots"])
def key_kernel(
    caches,  # uint64 [L]: address of each layer's cache
    like,  # any tensor of the caches' type
    about,  # int64 [requests, 6]
    slots,  # int64 [N]
    out,  # float32 [2, L, K, N]: norm, similarity
    stride_block, stride_head, stride_slot,
    stride_out, stride_out_layer, stride_out_head,
    SIZE: tl.constexpr, D: tl.constexpr, D_UP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One request, layer and KV head: the mean direction of its keys, then each key against it."""
    about += tl.program_id(0) * 6
    layer, head = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)  # times strides
    first, count, wanted = tl.load(about), tl.load(about + 1), tl.load(about + 5)
    cache = tl.load(caches + layer).to(tl.pointer_type(like.dtype.element_ty))
    anchor = tl.zeros((D_UP,), tl.float32)
    passes = tl.where((wanted & 16) != 0, count, 0)  # the norm alone needs no mean direction
    for start in range(0, passes, BLOCK):
        token = first + start + tl.arange(0, BLOCK)
        inside = token < first + count
        key = _load_keys(cache, slots, token, inside, head,
                         stride_block, stride_head, stride_slot, SIZE, D, D_UP)  # fmt: skip
        key = key.to(tl.float32)
        norm = tl.sqrt(tl.sum(key * key, 1))
        anchor += tl.sum(key / tl.maximum(norm, 1e-12)[:, None], 0)
    anchor /= tl.maximum(tl.sqrt(tl.sum(anchor * anchor, 0)), 1e-12)
    out += layer * stride_out_layer + head * stride_out_head
    for start in range(0, count, BLOCK):
        token = first + start + tl.arange(0, BLOCK)
        inside = token < first + count
        key = _load_keys(cache, slots, token, inside, head,
                         stride_block, stride_head, stride_slot, SIZE, D, D_UP)  # fmt: skip
        key = key.to(tl.float32)
        norm = tl.sqrt(tl.sum(key * key, 1))
        if (wanted & 8) != 0:
            tl.store(out + token, norm, mask=inside)
        if (wanted & 16) != 0:
            similarity = tl.sum(key * anchor[None, :], 1) / tl.maximum(norm, 1e-12)
            tl.store(out + stride_out + token, similarity, mask=inside)
