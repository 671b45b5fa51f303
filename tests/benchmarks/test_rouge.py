# SPDX-License-Identifier: Apache-2.0
"""The answer under an audit trail's mask, with a model whose choice tells what it has seen."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.quality.rouge import replay

NUM_TOKENS = 97
PROMPT = [(i * i + 3) % NUM_TOKENS for i in range(12)]
COUNT = 10
# Position -> the first query that does not see it. The answer's queries are 11 to 20.
GONE = {2: 14, 3: 14, 7: 14, 0: 17, 12: 17}


def choice(seen: Mapping[int, int]) -> int:
    """The next token, by position and token of all that its query sees."""
    return sum((position + 1) * (token + 1) for position, token in seen.items()) % NUM_TOKENS


def free_run(gone: Mapping[int, int]) -> list[int]:
    """The answer, token after token."""
    text = list(PROMPT)
    for _ in range(COUNT):
        query = len(text) - 1
        text.append(choice({p: t for p, t in enumerate(text) if query < gone.get(p, len(text))}))
    return text[len(PROMPT) :]


class Model:
    """Called as transformers' models are; chooses by ``choice``."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        use_cache: bool,
        logits_to_keep: int,
    ) -> Any:
        assert not use_cache
        self.num_calls += 1
        tokens = input_ids[0].tolist()
        seen = [np.flatnonzero(row == 0).tolist() for row in attention_mask[0, 0].numpy()]
        chosen = [choice({p: tokens[p] for p in row}) for row in seen[-logits_to_keep:]]
        one_hot = torch.nn.functional.one_hot(torch.tensor(chosen), NUM_TOKENS)
        return SimpleNamespace(logits=one_hot[None].float())


def row_of(event: str, positions: Sequence[int], first_query: int) -> dict[str, Any]:
    where = np.array(positions, np.int32)
    return {"event": event, "positions": where, "first_query": first_query}


AUDIT = [
    row_of("start", [], 0),
    row_of("evict", [2, 3, 7], 12),  # dead, but still in the row
    row_of("reclaim", [2, 3, 7], 14),
    row_of("evict", [0, 5, 12], 15),
    row_of("reclaim", [0, 12], 17),
    row_of("drop", [], 21),
]


def replayed(answer: Sequence[int], audit: Sequence[Mapping[str, Any]]) -> tuple[list[int], int]:
    """(the replay of a run that answered so, forwards that it took)"""
    model = Model()
    outputs = [SimpleNamespace(token_ids=tuple(answer))]
    output = SimpleNamespace(prompt_token_ids=tuple(PROMPT), outputs=outputs, audit=audit)
    return replay(SimpleNamespace(model=model), output), model.num_calls


def test_what_is_reclaimed_is_hidden_from_its_first_query_on() -> None:
    assert replayed(free_run(GONE), AUDIT) == (free_run(GONE), 1)


@pytest.mark.parametrize(
    "gone", [{}, *({**GONE, p: GONE[p] + late} for p in GONE for late in (-1, 1))]
)
def test_a_run_that_saw_anything_else_is_not_confirmed(gone: dict[int, int]) -> None:
    assert free_run(gone) != free_run(GONE), "or nothing is shown here"
    assert replayed(free_run(gone), AUDIT)[0] == free_run(GONE)


def test_without_a_reclaim_everything_before_a_query_is_seen() -> None:
    audit = [row for row in AUDIT if row["event"] != "reclaim"]
    assert replayed(free_run({}), audit) == (free_run({}), 1)


@pytest.mark.parametrize("first", range(COUNT))
def test_from_the_first_differing_token_on_it_runs_freely(first: int) -> None:
    """Nothing that the run said from there on has a say, however much of it is right."""
    right = free_run(GONE)
    one_wrong = [*right[:first], (right[first] + 1) % NUM_TOKENS, *right[first + 1 :]]
    all_wrong = [*right[:first], *((token + 1) % NUM_TOKENS for token in right[first:])]
    assert replayed(one_wrong, AUDIT)[0] == right
    assert replayed(all_wrong, AUDIT)[0] == right
