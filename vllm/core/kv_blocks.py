"""The blocks of requests in every group of layers, from one pool.

A request has a block table for each group (`vllm.architectures.cache_groups`). What lies wholly
before the window of the next token to compute goes back to the pool; its places in the table stay.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from vllm.architectures.cache_groups import WHOLE, CacheGroup
from vllm.core.block_pool import BlockPool
from vllm.core.request import Request
from vllm.utils.math_utils import cdiv


class CachedPrefix(NamedTuple):
    """num_tokens: that need not be computed. blocks: of each group, the last ones of these tokens;
    those before them, `num_passed`, no token will read."""

    num_tokens: int
    blocks: list[list[int]]
    num_passed: list[int]


class BlockNeeds:
    """How many blocks of the pool a request needs.

    sizes: tokens that a block holds, by group. max_step_tokens: of one step.
    """

    def __init__(self, block_size: int, groups: Sequence[CacheGroup], max_step_tokens: int):
        self.groups = groups
        self.sizes = [block_size * group.parts for group in groups]
        self.max_step_tokens = max_step_tokens
        # Between two updates: a window, the step in flight and the next one.
        longest = [group.window and group.window - 1 + 2 * max_step_tokens for group in groups]
        self._most = [tokens and cdiv(tokens, n) + 1 for tokens, n in zip(longest, self.sizes)]

    def of(self, num_tokens: int) -> int:
        """At most, at any time until it has this many tokens."""
        if not self._most[0] and len(self._most) == 1:
            return -(-num_tokens // self.sizes[0])
        counts = (cdiv(num_tokens, size) for size in self.sizes)
        return sum(min(n, most) if most else n for n, most in zip(counts, self._most))

    def resting(self, num_tokens: int) -> int:
        """Of one that has computed this many tokens and gets one more at a time."""
        lasts = (cdiv(num_tokens, size) for size in self.sizes)
        firsts = (passed(one.window, n, num_tokens) for one, n in zip(self.groups, self.sizes))
        return sum(last - first for last, first in zip(lasts, firsts))

    def longest(self, num_blocks: int, limit: int) -> int:
        """Tokens of the longest request, of at most `limit`, that fits into so many blocks."""
        return bisect_right(range(limit + 1), num_blocks, key=self.of) - 1


def passed(window: int, size: int, num_computed: int) -> int:
    """Leading blocks, of `size` tokens, that no token after `num_computed` reads."""
    return max(0, num_computed - window + 1) // size if window else 0


class KVBlocks:
    """Allocates and releases blocks of requests; `Request` has what they hold."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_step_tokens: int,
        groups: Sequence[CacheGroup] = WHOLE,
    ):
        self.pool = BlockPool(num_blocks)
        self.needs = BlockNeeds(block_size, groups, max_step_tokens)
        self.sizes = self.needs.sizes
        self._windows = [index for index, group in enumerate(groups) if group.window]
        self.has_windows = bool(self._windows)

    @property
    def num_per_step(self) -> int:
        """Blocks that the next token of a request may need."""
        return len(self.sizes)

    def lacking(self, request: Request, end: int) -> list[int]:
        """Blocks of each group that it needs besides its own, to hold `end` tokens."""
        tables = zip(request.block_ids, self.sizes)
        return [max(0, -(-end // size) - len(table)) for table, size in tables]

    def extend(self, request: Request, counts: Sequence[int]) -> list[list[int]]:
        """Allocates so many of each group; returns them."""
        found = [self.pool.take(count) for count in counts]
        for table, new in zip(request.block_ids, found):
            table += new
        self._count_slots(request)
        return found

    def spare_slots(self, request: Request, num_spare: int) -> int:
        """Tokens that it can hold with `num_spare` blocks more."""
        return request.num_slots + num_spare // len(self.sizes) * min(self.sizes)

    def admit(self, request: Request, cached: CachedPrefix, num_reserved: int) -> bool:
        """Allocates for all known tokens, but of window layers for those of the first step; False
        where fewer than `num_reserved` blocks would stay free of what it needs at most."""
        known, start = len(request.all_token_ids), cached.num_tokens
        first_end = min(known, start + self.needs.max_step_tokens)
        counts = [
            cdiv(first_end if group.window else known, size) - start // size
            for group, size in zip(self.needs.groups, self.sizes)
        ]
        free = self.pool.num_free - sum(
            self.pool.is_free(block) for blocks in cached.blocks for block in blocks
        )
        if free < sum(counts) + num_reserved:
            return False
        for block in (block for blocks in cached.blocks for block in blocks):
            self.pool.share(block)
        request.block_ids = []
        for found, num_passed, count in zip(cached.blocks, cached.num_passed, counts):
            held = found + self.pool.take(count)
            request.block_ids.append(held[:1] * num_passed + held)
        request.num_passed = list(cached.num_passed)
        request.num_computed_tokens = start
        self._count_slots(request)
        return True

    def release_passed(self, request: Request) -> None:
        """Gives back what no later token reads. A step in flight begins at `num_computed_tokens` at
        the earliest, and so do tokens after drafts that are taken back."""
        for index in self._windows:
            window, before = self.needs.groups[index].window, request.num_passed[index]
            now = passed(window, self.sizes[index], request.num_computed_tokens)
            if now > before:
                self.pool.release(request.block_ids[index][before:now])
                request.num_passed[index] = now

    def release(self, request: Request) -> None:
        """Gives back all."""
        for table, num_passed in zip(request.block_ids, request.num_passed):
            self.pool.release(table[num_passed:])
        request.block_ids, request.num_passed, request.num_slots = [], [], 0

    def _count_slots(self, request: Request) -> None:
        tables = zip(request.block_ids, self.sizes)
        request.num_slots = min(len(table) * size for table, size in tables)
