# SPDX-License-Identifier: Apache-2.0
"""What the latest queries of a request see in its resident keys: the reference, in plain torch.

Shape letters: Q queries, N resident tokens, H query heads, K KV heads, D head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import normalize

from vtoken.signals import Measure

How = Literal["mean", "max"]
# Attention is low below this share of the average: equal weights, such as that of a query's only
# key, must not fall to either side by rounding.
LOW = 1 - 1e-4
# (float32 ``[layers, N]`` of the heads here, how) -> the same of all heads of the tensor-parallel
# group, whose ranks hold equally many
OverGroup = Callable[[torch.Tensor, How], torch.Tensor]


def no_group(values_LN: torch.Tensor, how: How) -> torch.Tensor:
    """One rank holds all heads."""
    return values_LN


@dataclass(frozen=True)
class Heads:
    """How a layer turns queries and keys into logits, and how heads become one number.

    Attributes:
        scale: of the dot products.
        softcap: c in ``c * tanh(logit / c)``; 0 if there is none.
        reduction: over query heads.
    """

    scale: float
    softcap: float = 0.0
    reduction: How = "mean"

    def how(self, measure: Measure) -> How:
        """How heads are reduced for this measure."""
        of_mass = measure in (Measure.MEAN_MASS, Measure.LAST_MASS)
        return self.reduction if of_mass else "mean"


def measure_layer(
    query_QHD: torch.Tensor,
    key_NKD: torch.Tensor,
    positions_N: torch.Tensor,
    heads: Heads,
    measures: Sequence[Measure],
) -> torch.Tensor:
    """Measure one layer of one request.

    Args:
        query_QHD: the latest queries, after RoPE, oldest first; the last one is the newest token.
        key_NKD: the resident keys, after RoPE, in the order of the row.
        positions_N: their text positions.

    Returns:
        float32 ``[measures, N]``. Attention is the softmax over the resident tokens that a query
        may see; a token that it may not see gets 0, and is not below that query's average.
    """
    key_KND = key_NKD.float().transpose(0, 1)
    rows: dict[Measure, torch.Tensor] = {}
    if set(measures) & {Measure.MEAN_MASS, Measure.LAST_MASS, Measure.LOW_SHARE}:
        weight_HQN, visible_QN = _attention(query_QHD.float(), key_KND, positions_N, heads)
        if Measure.MEAN_MASS in measures:
            rows[Measure.MEAN_MASS] = _reduce(weight_HQN.mean(1), heads)
        if Measure.LAST_MASS in measures:
            rows[Measure.LAST_MASS] = _reduce(weight_HQN[:, -1], heads)
        if Measure.LOW_SHARE in measures:
            low_HQN = (weight_HQN * visible_QN.sum(1)[:, None] < LOW) & visible_QN
            rows[Measure.LOW_SHARE] = low_HQN.float().mean((0, 1))
    if Measure.KEY_NORM in measures:
        rows[Measure.KEY_NORM] = key_KND.norm(dim=-1).mean(0)
    if Measure.KEY_SIMILARITY in measures:
        unit_KND = normalize(key_KND, dim=-1)
        anchor_K1D = normalize(unit_KND.mean(1, keepdim=True), dim=-1)
        rows[Measure.KEY_SIMILARITY] = (unit_KND * anchor_K1D).sum(-1).mean(0)
    return torch.stack([rows[measure] for measure in measures])


def _attention(
    query_QHD: torch.Tensor, key_KND: torch.Tensor, positions_N: torch.Tensor, heads: Heads
) -> tuple[torch.Tensor, torch.Tensor]:
    """(softmax weights ``[H, Q, N]``, bool ``[Q, N]``: what each query may see)."""
    num_queries, num_heads, size = query_QHD.shape
    num_kv_heads, num_keys, _ = key_KND.shape
    group = num_heads // num_kv_heads  # query heads of a KV head are neighbours
    query_KMD = query_QHD.transpose(0, 1).reshape(num_kv_heads, group * num_queries, size)
    logits = torch.bmm(query_KMD, key_KND.transpose(1, 2)) * heads.scale
    if heads.softcap:
        logits = heads.softcap * torch.tanh(logits / heads.softcap)
    newest = positions_N.max()
    asked_Q = newest - torch.arange(num_queries - 1, -1, -1, device=positions_N.device)
    visible_QN = positions_N[None, :] <= asked_Q[:, None]
    logits_HQN = logits.view(num_heads, num_queries, num_keys)
    weights_HQN = logits_HQN.masked_fill(~visible_QN, float("-inf")).softmax(-1)
    # All that an old query saw may be gone.
    return weights_HQN.masked_fill(~visible_QN.any(1)[:, None], 0), visible_QN


def _reduce(values_HN: torch.Tensor, heads: Heads) -> torch.Tensor:
    return values_HN.amax(0) if heads.reduction == "max" else values_HN.mean(0)
