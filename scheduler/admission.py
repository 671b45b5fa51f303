# SPDX-License-Identifier: Apache-2.0
"""Admission and headroom arithmetic: pure functions over token and block counts.

A request is admitted by what it will hold at its worst once its dead tokens are reclaimed, not by
its prompt.
"""

from dataclasses import dataclass

from vtoken.options import EvictionOptions


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def worst_live(
    options: EvictionOptions, num_prompt_tokens: int, full_tokens: int, unseen: int = 0
) -> int:
    """Most live tokens a request of ``full_tokens`` in the end can be left with by its policy.

    Args:
        unseen: newest tokens that its policy cannot judge yet.
    """
    protected = options.sinks + max(options.recent, unseen)
    if options.protect_prompt:
        protected = max(protected, num_prompt_tokens + max(options.recent, unseen))
    # Below evict_after_tokens the policy does not run at all.
    floor = max(protected, options.evict_after_tokens)
    return min(full_tokens, max(floor, options.live_target(full_tokens)))


def chunk_of(options: EvictionOptions, live: int, block_size: int) -> int:
    """Tokens of one step of a prompt that is longer than what may live: a quarter of that, in whole
    blocks, so that it never holds much more; but not so few that steps with prompts in them, which
    are slow, become many."""
    chunk = min(live, max(live // 4, options.min_chunk_tokens))
    return max(block_size, chunk // block_size * block_size)


def worst_blocks(live: int, recent: int, new: int, block_size: int) -> int:
    """Private blocks that a request holds at its worst, given that holes are filled when blocks run
    out: its live tokens packed, the tail block, and what the next step adds.

    Args:
        recent: its latest tokens, which are live; those in the tail are not packed elsewhere.
        new: tokens of the next step, 1 while decoding.
    """
    return max(
        blocks_for(live - min(recent, tail, live), block_size) + blocks_for(tail + new, block_size)
        for tail in range(1, block_size + 1)
    )


@dataclass(frozen=True)
class Footprint:
    """Worst cases of one evicting request.

    Attributes:
        live: tokens its policy can leave it with.
        chunk: tokens of one step of a long prompt.
        decode: private blocks while decoding.
        prefill: private blocks while a text longer than ``live`` is computed.
        full: blocks of its full length.
    """

    live: int
    chunk: int
    decode: int
    prefill: int
    full: int

    @classmethod
    def in_full(cls, num_blocks: int) -> "Footprint":
        """Of a request that gives nothing back from now on."""
        return cls(0, 0, num_blocks, num_blocks, num_blocks)

    @property
    def least(self) -> int:
        """The least that ``cap`` ever says."""
        return min(self.full, self.decode)

    def chunk_limit(self, prefill_tokens: int) -> int:
        """Most tokens to compute in one step; 0: no limit, as it fits into what may live and one
        chunk."""
        return self.chunk if prefill_tokens > self.live + self.chunk else 0

    def cap(self, prefill_tokens: int, num_shared: int) -> int:
        """Most blocks that it can hold, shared ones included.

        Args:
            prefill_tokens: tokens of the text that is being computed; 0 while decoding.
        """
        private = self.prefill if prefill_tokens > self.live else self.decode
        return min(self.full, private + num_shared)


@dataclass(frozen=True)
class Lag:
    """Steps until a policy knows what it decides on.

    Attributes:
        depth: outputs in flight: signals about a step arrive that many steps later.
        late: steps that it may be asked too late, when many are due at once.
    """

    depth: int = 1
    late: int = 0


def footprint_of(
    options: EvictionOptions,
    num_prompt_tokens: int,
    full_tokens: int,
    block_size: int,
    lag: Lag = Lag(),
) -> Footprint:
    live = worst_live(options, num_prompt_tokens, full_tokens)
    chunk = chunk_of(options, live, block_size)
    live_prefill = live
    # Half a tick more than must be, two blocks at most, so that a filling frees several blocks.
    slack = min(options.tick_tokens // 2, 2 * block_size)
    if options.scorer.signals:
        unseen = options.tick_tokens + lag.depth + lag.late
        chunks = lag.depth * (chunk + 1)
        live = worst_live(options, num_prompt_tokens, full_tokens, unseen)
        live_prefill = worst_live(options, num_prompt_tokens, full_tokens, chunks)
        slack = max(slack, lag.depth)
    return Footprint(
        live,
        chunk,
        worst_blocks(live + slack, options.recent, 1, block_size),
        worst_blocks(max(live, live_prefill) + slack, options.recent, chunk, block_size),
        blocks_for(full_tokens, block_size),
    )


def headroom_blocks(num_blocks: int, fraction: float) -> int:
    """Blocks kept free for destinations: a count that admission respects, no parked block."""
    return -int(-num_blocks * fraction // 1)


@dataclass(frozen=True)
class Demand:
    """Blocks wanted beyond those held, of one request or summed over many.

    Attributes:
        capped: up to the cap, given that reclamation works.
        full: up to the whole length, without any reclamation.
    """

    capped: int
    full: int


def required_blocks(new: Demand, owed: Demand, headroom: int) -> int:
    """Free blocks that admitting ``new`` takes, when running requests are still owed ``owed``.

    Either everything fits at its cap beside the headroom, or everything fits at full length and
    nothing ever needs to be reclaimed. The second way keeps the promise that a replica admits at
    least as many requests as one that does not evict.
    """
    return min(new.capped + owed.capped + headroom, new.full + owed.full)
