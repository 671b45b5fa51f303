"""Attention by its definition, in loops and float64: what a probe should measure."""

import math

import numpy as np

from vtoken.measure import Heads
from vtoken.signals import Measure


def explicit(
    query: np.ndarray, key: np.ndarray, positions: list[int], heads: Heads
) -> dict[Measure, list[float]]:
    """The definition, in loops. ``query [Q, H, D]``, ``key [N, K, D]``, float64."""
    num_queries, num_heads, _ = query.shape
    group, newest = num_heads // key.shape[1], max(positions)
    mass = np.zeros((num_heads, num_queries, len(positions)))
    low = np.zeros_like(mass)
    for q in range(num_queries):
        asked = newest - (num_queries - 1 - q)
        seen = [n for n, p in enumerate(positions) if p <= asked]
        for h in range(num_heads if seen else 0):
            logits = [float(query[q, h] @ key[n, h // group]) * heads.scale for n in seen]
            if heads.softcap:
                logits = [heads.softcap * math.tanh(x / heads.softcap) for x in logits]
            top = max(logits)
            weights = [math.exp(x - top) for x in logits]
            for n, weight in zip(seen, weights, strict=True):
                share = weight / sum(weights)
                mass[h, q, n] = share
                low[h, q, n] = share < (1 - 1e-4) / len(seen)
    over_heads = np.max if heads.reduction == "max" else np.mean
    unit = key / np.linalg.norm(key, axis=-1, keepdims=True)
    anchor = unit.mean(0)
    anchor /= np.linalg.norm(anchor, axis=-1, keepdims=True)
    return {
        Measure.MEAN_MASS: over_heads(mass.mean(1), axis=0).tolist(),
        Measure.LAST_MASS: over_heads(mass[:, -1], axis=0).tolist(),
        Measure.LOW_SHARE: low.mean((0, 1)).tolist(),
        Measure.KEY_NORM: np.linalg.norm(key, axis=-1).mean(1).tolist(),
        Measure.KEY_SIMILARITY: (unit * anchor).sum(-1).mean(1).tolist(),
    }
