# SPDX-License-Identifier: Apache-2.0
"""The sample that ``random`` keeps hangs on its seed alone. Each look is from a process of its own:
within one, numbers are remembered, wherever they came from."""

import json
import subprocess
import sys
from pathlib import Path

LENGTH, NUM_SEEDS = 300, 8

SCORES = f"""
import json
import numpy as np
from vtoken.policies.random import Random
from vtoken.policy import TokenView

view = TokenView(np.arange({LENGTH}, dtype=np.int32), {LENGTH}, 0)
print(json.dumps([Random(seed).score(view).tolist() for seed in range({NUM_SEEDS})]))
"""


def kept_in_a_new_process() -> list[list[int]]:
    """For each seed the half of a text that scores highest."""
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", SCORES], cwd=root, stdout=subprocess.PIPE, check=True
    )
    return [
        sorted(sorted(range(LENGTH), key=scores.__getitem__)[LENGTH // 2 :])
        for scores in json.loads(ran.stdout)
    ]


def test_the_same_seed_keeps_the_same_tokens_in_every_process() -> None:
    assert kept_in_a_new_process() == kept_in_a_new_process()


def test_different_seeds_keep_different_tokens() -> None:
    assert len({tuple(kept) for kept in kept_in_a_new_process()}) == NUM_SEEDS
