# SPDX-License-Identifier: Apache-2.0
"""Eviction computed exactly: transformers, every query of every layer, a mask instead of memory.

What a policy loses by itself, without probes that look at few queries, without blocks, without
delay. Nothing of the engine runs here; of our code only the policies' formulas.
Shape letters: H query heads, K KV heads, C tokens of a chunk, N tokens so far, D head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import normalize
from transformers import AutoModelForCausalLM, DynamicCache

from vtoken.policy import Signal, TokenView, make_policy

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Eviction:
    """What to keep. ``keep_ratio`` 1 keeps everything."""

    policy: str
    keep_ratio: float
    seed: int = 0
    sinks: int = 4
    recent: int = 32
    window: int = 32

    def options(self) -> dict[str, Any]:
        """The same, as options of a request to the engine."""
        if self.keep_ratio == 1:
            return {"vtoken.policy": "keep_all"}
        return {
            "vtoken.policy": self.policy,
            "vtoken.keep_ratio": self.keep_ratio,
            "vtoken.seed": self.seed,
            "vtoken.sinks": self.sinks,
            "vtoken.recent": self.recent,
        }


@dataclass
class State:
    """One text under way.

    Attributes:
        live: bool ``[N]``, what later queries see.
        signals: by position, over all layers, heads and queries.
    """

    eviction: Eviction
    cache: DynamicCache = field(default_factory=DynamicCache)
    live: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    signals: dict[Signal, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.policy = make_policy(self.eviction.policy, self.eviction.seed, self.eviction.sinks)
        self.looks = bool(self.policy.signals) and self.eviction.keep_ratio < 1

    def bias(self, new: int) -> torch.Tensor:
        """float32 ``[new, N]``: the latest tokens see what is live and, causally, each other."""
        visible = self.live.repeat(new, 1)
        visible[:, self.live.numel() - new :] = torch.ones(new, new, dtype=torch.bool).tril()
        return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)

    def measure(self, attentions: Sequence[torch.Tensor]) -> None:
        """Add what the queries of a chunk say. ``[1, H, C, N]`` a layer."""
        wanted, window = self.policy.signals, self.eviction.window
        mean_CN = torch.stack([weights[0].mean(0) for weights in attentions]).mean(0)
        self._put(Signal.WINDOW_MASS, mean_CN[-window:].mean(0))
        self._put(Signal.LAST_MASS, mean_CN[-1])
        self._add(Signal.ATTENTION_MASS, mean_CN.sum(0))
        if Signal.LOW_SHARE in wanted:
            self._put(Signal.LOW_SHARE, self._low([w[:, :, -window:] for w in attentions]))
        if Signal.KEY_NORM in wanted:
            norms = [layer.keys[0].norm(dim=-1).mean(0) for layer in self.cache.layers]
            self._put(Signal.KEY_NORM, torch.stack(norms).mean(0))
        if Signal.KEY_SIMILARITY in wanted:
            self._put(Signal.KEY_SIMILARITY, self._similarity())

    def _low(self, attentions: Sequence[torch.Tensor]) -> torch.Tensor:
        """Share of the latest queries and of heads that gave a token less than the average."""
        new = attentions[0].shape[2]
        seen_CN = self.bias(new) == 0
        average_C1 = 1 / seen_CN.sum(1, keepdim=True)
        low = [((w[0] < average_C1) & seen_CN).float().mean((0, 1)) for w in attentions]
        return torch.stack(low).mean(0)

    def _similarity(self) -> torch.Tensor:
        found = []
        for layer in self.cache.layers:
            key_KND = layer.keys[0]
            anchor_K1D = normalize(key_KND[:, self.live], dim=-1).mean(1, keepdim=True)
            found.append(torch.cosine_similarity(key_KND, anchor_K1D, dim=-1).mean(0))
        return torch.stack(found).mean(0)

    def _put(self, signal: Signal, values: torch.Tensor) -> None:
        self.signals[signal] = values.double().numpy()

    def _add(self, signal: Signal, values: torch.Tensor) -> None:
        new, old = values.double().numpy(), self.signals.get(signal, np.zeros(0))
        new[: old.size] += old
        self.signals[signal] = new

    def evict(self) -> None:
        """Unset the lowest-scored unprotected live tokens until the ratio is kept."""
        length, eviction = self.live.numel(), self.eviction
        budget = int(np.ceil(length * eviction.keep_ratio - 1e-9))
        positions = np.flatnonzero(self.live.numpy())
        known = {name: values[positions] for name, values in self.signals.items()}
        view = TokenView(positions.astype(np.int32), length, length, budget, known)
        scores = np.array(self.policy.score(view), np.float64)
        scores[(positions < eviction.sinks) | (positions >= length - eviction.recent)] = np.inf
        victims = np.argsort(scores, kind="stable")[: max(0, positions.size - budget)]
        self.live[positions[victims[scores[victims] < np.inf]]] = False


class ExactModel:
    """A model in float32 whose attention weights are all looked at."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def logprobs(self, tokens: Sequence[int], eviction: Eviction, chunk: int) -> Floats:
        """float64 ``[len(tokens) - 1]``: of each next token, teacher forced, chunk after chunk; the
        policy runs after each."""
        return np.concatenate(list(self._chunks(tokens, eviction, chunk)))[: len(tokens) - 1]

    def _chunks(self, tokens: Sequence[int], eviction: Eviction, chunk: int) -> Iterator[Floats]:
        state = State(eviction)
        following = [*tokens[1:], 0]
        for start in range(0, len(tokens), chunk):
            output = self.feed(state, tokens[start : start + chunk])
            targets = torch.tensor(following[start : start + chunk])
            logits = output.logits[0].double().log_softmax(-1)
            yield logits.gather(1, targets[:, None])[:, 0].numpy()
            if eviction.keep_ratio < 1:
                state.evict()

    def feed(self, state: State, tokens: Sequence[int]) -> Any:
        """Compute the next tokens of a text, and measure them."""
        part = torch.tensor(tokens)
        state.live = torch.cat([state.live, torch.ones(len(part), dtype=torch.bool)])
        total = state.live.numel()
        with torch.inference_mode():
            output = self.model(
                input_ids=part[None],
                attention_mask=state.bias(len(part))[None, None],
                past_key_values=state.cache,
                cache_position=torch.arange(total - len(part), total),
                output_attentions=state.looks,
            )
        if state.looks:
            state.measure(output.attentions)
        return output
