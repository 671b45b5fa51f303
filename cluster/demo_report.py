# SPDX-License-Identifier: Apache-2.0
"""What the demo concludes from its three runs. No Ray, no vLLM."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import pyarrow.compute as pc
import pyarrow.parquet as pq

from cluster.demo_requests import Reply

BLOCK_SIZE = 32
OURS = ("vtoken", "worker", "scheduler", "cluster")

# An eviction: length of the request's text at that step, and the positions that were evicted.
Eviction = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class Arm:
    """One run.

    Attributes:
        imports: our modules in each process of its engine, by process id.
        evictions: how often each eviction happened, over all requests.
    """

    name: str
    replies: tuple[Reply, ...]
    seconds: float
    peak_blocks: int
    imports: Mapping[int, frozenset[str]]
    evictions: Counter[Eviction] = field(default_factory=Counter)

    @property
    def stock(self) -> bool:
        return all(reply.eviction is None for reply in self.replies)

    @property
    def tokens_per_s(self) -> float:
        return sum(reply.completion_tokens for reply in self.replies) / self.seconds

    def blocks_held(self) -> list[int]:
        """Row length of each request at its last step.

        vToken's scheduler reports the length of vLLM's own row. Stock vLLM reports none, but keeps
        every token: its row is as long as its stored tokens need.
        """
        return [
            -(-reply.stored_tokens // BLOCK_SIZE)
            if reply.eviction is None
            else reply.eviction["blocks_held"]
            for reply in self.replies
        ]

    def live_tokens(self) -> list[int]:
        return [
            reply.stored_tokens if reply.eviction is None else reply.eviction["tokens_live"]
            for reply in self.replies
        ]

    def fragmentation(self) -> float:
        """F over all requests: 1 - live tokens / (blocks held * block size)."""
        return 1 - sum(self.live_tokens()) / (sum(self.blocks_held()) * BLOCK_SIZE)

    def given_back(self) -> int:
        return sum(self._counted("blocks_given_back"))

    def evicted(self) -> int:
        return sum(self._counted("tokens_evicted"))

    def _counted(self, name: str) -> list[int]:
        return [0 if reply.eviction is None else reply.eviction[name] for reply in self.replies]


HEADINGS = (
    "",
    "blocks held\nper request",
    "live tokens\nper request",
    "F",
    "blocks\ngiven back",
    "peak blocks\nin use",
    "tokens/s",
)


def table(arms: Iterable[Arm]) -> str:
    """The arms side by side, as text."""
    rows = [
        (
            arm.name,
            _mean_and_range(arm.blocks_held()),
            _mean_and_range(arm.live_tokens()),
            f"{arm.fragmentation():.2f}",
            str(arm.given_back()),
            str(arm.peak_blocks),
            f"{arm.tokens_per_s:.0f}",
        )
        for arm in arms
    ]
    split = [heading.split("\n") for heading in HEADINGS]
    head = [tuple(["", *lines][-2:][row] for lines in split) for row in (0, 1)]
    widths = [max(len(row[column]) for row in (*head, *rows)) for column in range(len(HEADINGS))]
    rule = tuple("-" * width for width in widths)
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in (*head, rule, *rows)
    )


def findings(stock: Arm, naive: Arm, vtoken: Arm) -> list[tuple[bool, str]]:
    """What the demo claims, each with whether the runs bear it out."""
    return [
        (
            len(stock.imports) >= 2 and not any(stock.imports.values()),
            f"stock: no module of {', '.join(OURS)} in its engine's processes {_pids(stock)}",
        ),
        (
            all("vtoken" in modules for modules in naive.imports.values())
            and all("vtoken" in modules for modules in vtoken.imports.values()),
            "naive and vToken: vtoken is loaded in theirs (so the line above can fail)",
        ),
        (
            naive.evictions == vtoken.evictions and vtoken.evictions.total() > 0,
            f"naive and vToken evicted the same positions at the same steps of their requests: "
            f"{vtoken.evicted()} tokens, {vtoken.evictions.total()} evictions",
        ),
        (
            vtoken.given_back() > 0 and sum(vtoken.blocks_held()) < sum(naive.blocks_held()),
            f"vToken gave back {vtoken.given_back()} blocks while its requests ran; "
            f"naive eviction {naive.given_back()}",
        ),
    ]


def read_evictions(audit: Path) -> Counter[Eviction]:
    """The evictions of an arm's audit trail; none for an arm that keeps no trail."""
    if not audit.exists():
        return Counter()
    table = pq.read_table(audit, columns=["event", "first_query", "positions"])
    rows = table.filter(pc.field("event") == "evict").to_pylist()
    return Counter((row["first_query"], tuple(sorted(row["positions"]))) for row in rows)


def _mean_and_range(values: list[int]) -> str:
    return f"{fmean(values):.1f} ({min(values)}-{max(values)})"


def _pids(arm: Arm) -> str:
    return ", ".join(map(str, sorted(arm.imports))) or "(none seen)"
