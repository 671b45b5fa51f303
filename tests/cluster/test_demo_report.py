# SPDX-License-Identifier: Apache-2.0
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from cluster.demo_report import BLOCK_SIZE, Arm, findings, read_evictions, table
from cluster.demo_requests import Reply, conversations
from vtoken.audit import AuditTrail

LOADED = frozenset(("vtoken", "worker"))


def make_arm(name: str, held: int | None, *, victim: int = 7, back: int = 0) -> Arm:
    """Two requests of 40 + 601 tokens; `held` is None for a stock server."""
    report = {
        "blocks_held": held,
        "tokens_live": 320,
        "tokens_evicted": 320,
        "blocks_given_back": back,
    }
    reply = Reply(40, 601, "text", None if held is None else report)
    imports = {11: frozenset[str](), 12: frozenset[str]()}
    if held is not None:
        imports = {21: LOADED, 22: LOADED}
    evictions = Counter({(64, (victim, 9)): 2} if held is not None else {})
    return Arm(name, (reply, reply), 4.0, 42, imports, evictions)


STOCK = make_arm("stock", None)
NAIVE = make_arm("naive", 20)
VTOKEN = make_arm("vToken", 11, back=10)


def test_stock_holds_what_its_stored_tokens_need() -> None:
    assert STOCK.blocks_held() == [20, 20]  # 640 tokens: the last one was never stored
    assert STOCK.live_tokens() == [640, 640]
    assert STOCK.fragmentation() == 0.0


def test_fragmentation_is_dead_space_in_held_blocks() -> None:
    assert NAIVE.fragmentation() == 0.5
    assert VTOKEN.fragmentation() == 1 - 320 / (11 * BLOCK_SIZE)


def test_table_has_one_row_per_arm_under_aligned_headings() -> None:
    lines = table([STOCK, NAIVE, VTOKEN]).splitlines()
    assert len(lines) == 6
    assert [line.split()[0] for line in lines[3:]] == ["stock", "naive", "vToken"]
    assert "11.0 (11-11)" in lines[5]
    assert all(len(line) <= len(lines[2]) for line in lines)


def test_findings_hold_for_what_the_demo_expects() -> None:
    assert all(holds for holds, _ in findings(STOCK, NAIVE, VTOKEN))


def test_each_finding_fails_when_its_claim_is_false() -> None:
    leaky = Arm("stock", STOCK.replies, 4.0, 42, {11: frozenset(), 12: LOADED})
    unseen = Arm("stock", STOCK.replies, 4.0, 42, {})
    unloaded = replace(VTOKEN, imports=STOCK.imports)
    others = make_arm("vToken", 11, victim=8, back=10)
    useless = make_arm("vToken", 20)

    def failing(stock: Arm, naive: Arm, vtoken: Arm) -> list[int]:
        results = findings(stock, naive, vtoken)
        return [index for index, (holds, _) in enumerate(results) if not holds]

    assert failing(leaky, NAIVE, VTOKEN) == [0]
    assert failing(unseen, NAIVE, VTOKEN) == [0]
    assert failing(STOCK, NAIVE, unloaded) == [1]
    assert failing(STOCK, NAIVE, others) == [2]
    assert failing(STOCK, NAIVE, useless) == [3]


def test_evictions_are_read_from_an_audit_trail_whatever_the_order(tmp_path: Path) -> None:
    assert read_evictions(tmp_path / "none") == Counter()
    for name, orders in {"a": ([3, 5], [4]), "b": ([4], [5, 3])}.items():
        trail = AuditTrail(str(tmp_path / name))
        for order in orders:
            trail.record(event="evict", first_query=64, positions=np.array(order, np.int32))
        trail.record(event="reclaim", first_query=70, positions=np.array([3], np.int32))
        trail.write()
    assert read_evictions(tmp_path / "a") == Counter({(64, (3, 5)): 1, (64, (4,)): 1})
    assert read_evictions(tmp_path / "a") == read_evictions(tmp_path / "b")


def test_half_of_the_requests_share_a_prefix() -> None:
    contents = [messages[0]["content"] for messages in conversations()]
    assert len(set(contents)) == 8
    shared = [content for content in contents if content.startswith("The harbour museum")]
    assert len(shared) == 4
