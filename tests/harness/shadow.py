"""The token table of one request once more, as lists and dicts that anybody can follow."""

from vtoken.hole_filling import HoleFilling
from vtoken.plan import RelocationPlan
from vtoken.table import TokenTable


class Shadow:
    """Attributes:
    row: the positions in each block, in the order of the row.
    payloads: position -> what its slot must hold, for every position ever computed.
    live: positions that the policy still wants.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.row: list[list[int]] = []
        self.payloads: dict[int, int] = {}
        self.live: set[int] = set()

    def shareable(self) -> int:
        """Full blocks at the head of the row that hold the first tokens of the text."""
        for i, block in enumerate(self.row):
            if block != list(range(i * self.block_size, (i + 1) * self.block_size)):
                return i
        return len(self.row)

    def head(self, num_blocks: int) -> "Shadow":
        """Another request that begins with the first blocks of this one."""
        other = Shadow(self.block_size)
        for position in range(num_blocks * self.block_size):
            other.append(self.payloads[position])
        return other

    @property
    def length(self) -> int:
        return len(self.payloads)

    @property
    def resident(self) -> list[int]:
        return [position for block in self.row for position in block]

    def append(self, payload: int) -> None:
        position = self.length
        if not self.row or len(self.row[-1]) == self.block_size:
            self.row.append([])
        self.row[-1].append(position)
        self.payloads[position] = payload
        self.live.add(position)

    def evict(self, positions: list[int]) -> None:
        assert set(positions) <= self.live, "a token died twice"
        self.live -= set(positions)

    def commit(self, plan: RelocationPlan) -> None:
        """Whole blocks out, whole blocks in where the first one was."""
        sources = plan.source_indices.tolist()
        tokens = [position for i in sources for position in self.row[i]]
        moved = [token for token, moves in zip(tokens, plan.selected, strict=True) if moves]
        assert set(tokens) & self.live <= set(moved), "I1: a live token is left behind"
        size = self.block_size
        new = [moved[i : i + size] for i in range(0, len(moved), size)]
        assert all(len(block) == size for block in new) and len(new) < len(sources)
        kept = [block for i, block in enumerate(self.row) if i not in sources]
        self.row = kept[: sources[0]] + new + kept[sources[0] :]

    def fill(self, filling: HoleFilling) -> None:
        """Single tokens over dead ones, then whole blocks out."""
        size, sources = self.block_size, filling.source_indices.tolist()
        overwritten = set()
        for moved, hole in zip(filling.moved.tolist(), filling.holes.tolist(), strict=True):
            target = self.row[hole // size]
            overwritten.add(target[hole % size])
            assert hole // size not in sources and moved // size in sources
            target[hole % size] = self.row[moved // size][moved % size]
        assert not overwritten & self.live, "I1: a live token is overwritten"
        kept = [block for i, block in enumerate(self.row) if i not in sources]
        assert self.live <= {p for block in kept for p in block}, "I1: a live token is left behind"
        self.row = kept

    def check(self, table: TokenTable) -> None:
        """The table says the same, in all its ways of saying it. It may not have heard of the
        latest tokens yet."""
        table.check()
        known = table.positions.tolist()
        assert known == self.resident[: len(known)]
        alive = {p for p, live in zip(known, table.live, strict=True) if live}
        assert alive == self.live & set(known)
        assert table.num_live == len(alive)
        assert table.length - table.shift == len(known)
        counts = [len(alive & set(block)) for block in self.row]
        assert table.block_live.tolist()[: len(counts)] == counts[: len(table.block_ids)]
