# SPDX-License-Identifier: Apache-2.0
"""What a model would have chosen if attention had been told exactly which tokens are gone.

Plain transformers, one forward over prompt and output with a static mask, float32. Imports nothing
of this project: what it knows of a run is the tokens, their logprobs and the audit trail.
Shape letters: L tokens fed, N tokens chosen, V vocabulary.
"""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

# Measured with SmolLM2: with the right mask logprobs differ by at most 5e-5.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Reclaim:
    """From query ``first_query`` on, nobody sees ``positions``."""

    first_query: int
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """What an engine chose greedily for one prompt, the logprob of each choice, and what was
    reclaimed meanwhile. The last token is chosen, never fed."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    reclaims: tuple[Reclaim, ...]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def share_reclaimed(self) -> float:
        return sum(len(reclaim.positions) for reclaim in self.reclaims) / self.length

    def believing(self, reclaims: Iterable[Reclaim]) -> "Case":
        """The same output, explained by other reclaims."""
        return replace(self, reclaims=tuple(reclaims))

    def part(self, first: int, last: int) -> "Case":
        """Tokens [first, last) of the output, as the answer to everything before them."""
        return replace(
            self,
            prompt=self.prompt + self.tokens[:first],
            tokens=self.tokens[first:last],
            logprobs=self.logprobs[first:last],
        )


@dataclass(frozen=True)
class Verdict:
    """How far a case is from the model's own choice."""

    max_difference: float
    all_argmax: bool

    @property
    def agrees(self) -> bool:
        return self.all_argmax and self.max_difference <= TOLERANCE


def make_case(output: Any, rows: Iterable[dict[str, Any]]) -> Case:
    """One finished output of vLLM with one incarnation's rows of the audit trail."""
    (completion,) = output.outputs
    tokens = list(completion.token_ids)
    chosen = zip(completion.logprobs, tokens, strict=True)
    reclaims = tuple(
        Reclaim(row["first_query"], tuple(row["positions"]))
        for row in rows
        if row["event"] == "reclaim"
    )
    logprobs = [entry[token].logprob for entry, token in chosen]
    return Case(list(output.prompt_token_ids), tokens, logprobs, reclaims)


def static_mask(case: Case) -> torch.Tensor:
    """bool ``[L, L]``: query q (row) sees position k (column) iff k <= q and q comes before the
    first query computed after k was reclaimed."""
    fed = case.length - 1
    index = torch.arange(fed)
    unseen_from = torch.full((fed,), fed)
    for reclaim in case.reclaims:
        positions = list(reclaim.positions)
        assert bool((unseen_from[positions] == fed).all()), "a position is reclaimed twice"
        unseen_from[positions] = reclaim.first_query
    return (index[None, :] <= index[:, None]) & (index[:, None] < unseen_from[None, :])


class Oracle:
    """A model in float32, asked with teacher forcing."""

    def __init__(self, model: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def judge_all(self, cases: Sequence[Case]) -> list[Verdict]:
        # One case a core: tests run torch with one thread.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(self.judge, cases))

    def judge(self, case: Case) -> Verdict:
        logprobs_NV = self._logprobs(case)
        difference = self._differences(case, logprobs_NV).max()
        all_argmax = (logprobs_NV.argmax(-1) == torch.tensor(case.tokens)).all()
        return Verdict(float(difference), bool(all_argmax))

    def differences(self, case: Case) -> torch.Tensor:
        """float ``[N]``: how far each logprob is from the model's own, for engines of less
        precision."""
        return self._differences(case, self._logprobs(case))

    @staticmethod
    def _differences(case: Case, logprobs_NV: torch.Tensor) -> torch.Tensor:
        own = logprobs_NV.gather(1, torch.tensor(case.tokens)[:, None])[:, 0]
        return (own - torch.tensor(case.logprobs)).abs()

    def _logprobs(self, case: Case) -> torch.Tensor:
        mask_LL = static_mask(case)
        bias_LL = torch.zeros(mask_LL.shape).masked_fill(~mask_LL, torch.finfo(torch.float32).min)
        with torch.inference_mode():
            logits = self.model(
                input_ids=torch.tensor((case.prompt + case.tokens)[:-1])[None],
                attention_mask=bias_LL[None, None],
                use_cache=False,
                logits_to_keep=len(case.tokens),
            ).logits
        return logits[0].log_softmax(-1)
