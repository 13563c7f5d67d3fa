"""Prefix caching: requests with a common prefix share KV blocks.

The hash of a full block covers its tokens and the hash of the block before it, so equal hashes mean
equal prefixes and an equal salt, where requests have one. SHA-256, because a collision would leak
one user's context to another.

A prefix is found as far as every group of layers has it: layers without a window all its blocks,
window layers those that the next token sees.
"""

from array import array
from hashlib import sha256
from math import lcm

from vllm.core.kv_blocks import CachedPrefix, KVBlocks, passed
from vllm.core.request import Request


def _root(salt: str | None) -> bytes:
    """What the first block's hash covers besides its tokens."""
    return b"" if salt is None else sha256(salt.encode()).digest()


class PrefixCache:
    """Finds and records the blocks of `blocks`. num_queried and num_hit count tokens since the
    start."""

    def __init__(self, blocks: KVBlocks, block_size: int, enabled: bool):
        self.pool = blocks.pool
        self.block_size = block_size
        self.enabled = enabled
        self.num_queried = 0
        self.num_hit = 0
        groups = blocks.needs.groups
        # Of every group: tokens of a block, and what follows the hash of the tokens in its keys.
        self._windows = [group.window for group in groups]
        self._parts = [group.parts for group in groups]
        self._sizes = blocks.sizes
        self._suffixes = [bytes([index]) if index else b"" for index in range(len(groups))]
        # Hits are whole blocks of every group, in blocks of the cache.
        self._unit = lcm(*self._parts)

    def match(self, request: Request) -> CachedPrefix:
        """The cached prefix of the request, without its last token, which is always computed, for
        its logits."""
        num_blocks = 0
        # Prompt logprobs need every prompt position computed.
        if self.enabled and request.sampling.prompt_logprobs is None:
            num_blocks = (len(request.all_token_ids) - 1) // self.block_size
        found: list[list[int]] = [[] for _ in self._windows]
        for index, window in enumerate(self._windows):
            if not window:
                found[index] = self._run(request, index, num_blocks)
                num_blocks = len(found[index]) * self._parts[index]
        num_blocks -= num_blocks % self._unit
        before = num_blocks + 1
        while any(self._windows) and num_blocks < before:
            before = num_blocks
            for index, window in enumerate(self._windows):
                if window:
                    num_blocks, found[index] = self._last_window(request, index, num_blocks)
        return self._cut(found, num_blocks)

    def shortened(self, cached: CachedPrefix, num_blocks: int) -> CachedPrefix:
        """The first `num_blocks` blocks of the cache, of a model without windows."""
        return self._cut(cached.blocks, num_blocks)

    def _cut(self, found: list[list[int]], num_blocks: int) -> CachedPrefix:
        num_tokens = num_blocks * self.block_size
        num_passed = [
            passed(window, size, num_tokens) for window, size in zip(self._windows, self._sizes)
        ]
        kept = [
            blocks[: num_blocks // parts - skipped]
            for blocks, parts, skipped in zip(found, self._parts, num_passed)
        ]
        return CachedPrefix(num_tokens, kept, num_passed)

    def _run(self, request: Request, index: int, num_blocks: int) -> list[int]:
        """What the group has of the first `num_blocks`, from the start on without a gap."""
        hashes, suffix, parts = request.block_hashes, self._suffixes[index], self._parts[index]
        found = []
        for last in range(parts - 1, num_blocks, parts):
            self.hash(request, last + 1)  # no further than needed: the step waits for this
            block = self.pool.find(hashes[last] + suffix)
            if block is None:
                break
            found.append(block)
        return found

    def _last_window(self, request: Request, index: int, num_blocks: int) -> tuple[int, list[int]]:
        """The longest prefix of at most `num_blocks` whose last window the group has, and the
        blocks of that."""
        parts, size = self._parts[index], self._sizes[index]
        self.hash(request, num_blocks)
        while num_blocks:
            first = passed(self._windows[index], size, num_blocks * self.block_size)
            found: list[int] = []
            for i in range(num_blocks // parts - 1, first - 1, -1):
                block = self.pool.find(self._key(request, index, i))
                if block is None:
                    num_blocks = i * parts - i * parts % self._unit
                    break
                found.append(block)
            else:
                return num_blocks, found[::-1]
        return 0, []

    def _key(self, request: Request, index: int, block: int) -> bytes:
        """Of block `block` of the request in the group's table, whose last hash is known."""
        last = (block + 1) * self._parts[index] - 1
        return request.block_hashes[last] + self._suffixes[index]

    def record(self, request: Request, num_before: int) -> None:
        """Registers the blocks that became full since `num_before` tokens were computed."""
        if not self.enabled:
            return
        num_now = request.num_computed_tokens
        first, last = num_before // self.block_size, num_now // self.block_size
        if first == last:
            return
        self.hash(request, last)
        for index, size in enumerate(self._sizes):
            for i in range(num_before // size, num_now // size):
                self.pool.remember(request.block_ids[index][i], self._key(request, index, i))

    def forget(self, request: Request) -> None:
        """Removes the request's blocks, those that it lost with a preemption too."""
        for index, parts in enumerate(self._parts):
            keys = (self._key(request, index, i) for i in range(len(request.block_hashes) // parts))
            blocks = map(self.pool.find, keys)
            self.pool.forget([block for block in blocks if block is not None])

    def hash_ahead(self, request: Request, num_tokens: int) -> None:
        """Computes the hashes that `record` needs after `num_tokens`, as far as the tokens are
        known, while the device computes the step."""
        if self.enabled:
            self.hash(request, min(num_tokens, len(request.all_token_ids)) // self.block_size)

    def hash(self, request: Request, num_blocks: int) -> None:
        """Extends `block_hashes` to at least `num_blocks` blocks, which must be full."""
        hashes, size = request.block_hashes, self.block_size
        if len(hashes) >= num_blocks:
            return
        tokens = array("Q", request.all_token_ids[len(hashes) * size : num_blocks * size])
        content, stride = tokens.tobytes(), size * tokens.itemsize
        last = hashes[-1] if hashes else _root(request.cache_salt)
        for start in range(0, len(content), stride):
            last = sha256(last + content[start : start + stride]).digest()
            hashes.append(last)
