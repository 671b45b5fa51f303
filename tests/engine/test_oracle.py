# SPDX-License-Identifier: Apache-2.0
"""Every token that an evicting engine chooses is the one that attention without the reclaimed
tokens chooses, and the check that says so notices one token too much."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.oracle import Case, Oracle, make_case

pytestmark = pytest.mark.engine

# The budget is 96: the longer ones are evicted from while they are computed, chunk by chunk.
LENGTHS = (60, 75, 90, 110, 140, 180, 240, 320)
NUM_TOKENS = 200

Start = Callable[..., Any]
Sampling = Callable[..., Any]


def answered(engine: Any, outputs: list[Any]) -> list[Case]:
    """Outputs of requests that were never preempted."""
    cases = []
    for output in outputs:
        rows = engine.audit_rows(output.request_id)
        assert len({row["incarnation"] for row in rows}) <= 1
        cases.append(make_case(output, rows))
    return cases


def without_reclaims(case: Case) -> Case:
    return case.believing(())


def one_step_early(case: Case) -> Case:
    """The second reclaim while decoding takes effect one query too early."""
    decoding = [r for r in case.reclaims if r.first_query >= len(case.prompt)]
    moved = decoding[1]
    early = replace(moved, first_query=moved.first_query - 1)
    return case.believing(early if r is moved else r for r in case.reclaims)


def one_position_left(case: Case) -> Case:
    """The lowest position of the first reclaim stays visible."""
    first, *others = case.reclaims
    return case.believing([replace(first, positions=first.positions[1:]), *others])


RUNS = [("random", False), ("streaming_llm", False), ("random", True), ("h2o", False)]


@pytest.fixture(scope="module", params=RUNS, ids=["random", "streaming_llm", "in place", "h2o"])
def cases(
    request: pytest.FixtureRequest,
    start_engine: Start,
    evicting: Sampling,
    passages: list[list[int]],
) -> list[Case]:
    engine, (policy, in_place) = start_engine(), request.param
    prompts = [passage[:length] for passage, length in zip(passages, LENGTHS, strict=False)]
    reclaimer = engine.scheduler.reclaimer
    filled, reclaimer.planner.in_place = reclaimer.stats.holes_filled, in_place
    outputs = engine.run(prompts, evicting(policy, NUM_TOKENS))
    reclaimer.planner.in_place = False
    assert (reclaimer.stats.holes_filled - filled >= 3 * len(prompts)) == in_place
    return answered(engine, outputs)


def test_enough_is_reclaimed_for_the_run_to_count(
    cases: list[Case], request: pytest.FixtureRequest
) -> None:
    assert [len(case.prompt) for case in cases] == list(LENGTHS)
    assert all(len(case.tokens) == NUM_TOKENS for case in cases)
    assert min(len(case.reclaims) for case in cases) >= 3
    assert min(case.share_reclaimed for case in cases) >= 0.4
    # What h2o decides about a chunk takes effect two steps later: only in the longest prompts.
    while_prefilling = 2 if "h2o" in request.node.name else 3
    first_queries = [case.reclaims[0].first_query for case in cases]
    assert sum(q < n for q, n in zip(first_queries, LENGTHS, strict=True)) >= while_prefilling


def test_every_token_is_the_choice_of_attention_without_the_reclaimed(
    cases: list[Case], oracle: Oracle
) -> None:
    verdicts = oracle.judge_all(cases)
    print(f"largest difference: {max(v.max_difference for v in verdicts):.1e}")
    assert all(verdict.agrees for verdict in verdicts), verdicts


@pytest.mark.parametrize("fault", [without_reclaims, one_step_early, one_position_left])
def test_a_wrong_mask_is_told_apart_on_every_prompt(
    fault: Callable[[Case], Case], cases: list[Case], oracle: Oracle
) -> None:
    verdicts = oracle.judge_all([fault(case) for case in cases])
    print(f"{fault.__name__}: smallest {min(v.max_difference for v in verdicts):.1e}")
    assert not any(verdict.agrees for verdict in verdicts), verdicts


def test_one_output_in_flight_gives_the_choice_of_the_oracle_too(
    start_engine: Start, evicting: Sampling, oracle: Oracle, passages: list[list[int]]
) -> None:
    engine = start_engine(async_scheduling=False)
    assert engine.scheduler.depth == 1
    outputs = engine.run([passages[0][:80], passages[1][:150]], evicting("random", 120))
    cases = answered(engine, outputs)
    assert min(case.share_reclaimed for case in cases) >= 0.4
    assert all(verdict.agrees for verdict in oracle.judge_all(cases))
    assert not any(v.agrees for v in oracle.judge_all([without_reclaims(c) for c in cases]))


def test_blocks_shared_by_an_evicting_request_hold_no_evicted_context(
    start_engine: Start, evicting: Sampling, oracle: Oracle, passages: list[list[int]]
) -> None:
    """A text is evicted from; then the same text is asked twice more, with all of it kept and
    with another sample of it. Both begin with cached blocks of the request before."""
    engine = start_engine()
    prompt = passages[2][:250]
    engine.run([prompt], evicting("random", 40))
    outputs = engine.run([prompt], evicting("keep_all", 40), reset=False)
    outputs += engine.run([prompt], evicting("random", 40, seed=1), reset=False)
    assert min(output.num_cached_tokens for output in outputs) >= 96
    kept, sampled = answered(engine, outputs)
    assert not kept.reclaims and sampled.share_reclaimed >= 0.4
    assert all(verdict.agrees for verdict in oracle.judge_all([kept, sampled]))
    assert not oracle.judge(without_reclaims(sampled)).agrees
