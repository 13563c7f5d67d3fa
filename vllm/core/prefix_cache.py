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
        self._groups = [*enumerate(zip(blocks.needs.groups, blocks.sizes))]
        # Hits are whole blocks of every group, in blocks of the cache.
        self._unit = lcm(*(group.parts for group in blocks.needs.groups))

    def match(self, request: Request) -> CachedPrefix:
        """The cached prefix of the request, without its last token, which is always computed, for
        its logits."""
        num_blocks = 0
        # Prompt logprobs need every prompt position computed.
        if self.enabled and request.sampling.prompt_logprobs is None:
            num_blocks = (len(request.all_token_ids) - 1) // self.block_size
        for index, (group, _) in self._groups:
            if not group.window:
                num_blocks = self._run(request, index, num_blocks)
        before = -1
        while before != num_blocks:
            before = num_blocks
            for index, (group, _) in self._groups:
                if group.window:
                    num_blocks = self._last_window(request, index, num_blocks)
        return self.prefix(request, num_blocks)

    def prefix(self, request: Request, num_blocks: int) -> CachedPrefix:
        """The first `num_blocks` blocks of the cache of a prefix that `match` found."""
        num_tokens = num_blocks * self.block_size
        skipped = [passed(group, size, num_tokens) for _, (group, size) in self._groups]
        found = [
            [self._find(request, index, i) for i in range(first, num_tokens // size)]
            for first, (index, (_, size)) in zip(skipped, self._groups)
        ]
        return CachedPrefix(num_tokens, found, skipped)  # type: ignore[arg-type]

    def _run(self, request: Request, index: int, num_blocks: int) -> int:
        """As many of the first `num_blocks` as the group has from the start on."""
        parts = self._groups[index][1][0].parts
        for i in range(num_blocks // parts):
            self.hash(request, (i + 1) * parts)  # no further than needed: the step waits for this
            if self._find(request, index, i) is None:
                num_blocks = i * parts
                break
        return num_blocks - num_blocks % self._unit

    def _last_window(self, request: Request, index: int, num_blocks: int) -> int:
        """The longest prefix of at most `num_blocks` whose last window the group has."""
        group, size = self._groups[index][1]
        while num_blocks := num_blocks - num_blocks % self._unit:
            self.hash(request, num_blocks)
            first = passed(group, size, num_blocks * self.block_size)
            seen = range(num_blocks // group.parts - 1, first - 1, -1)
            lacking = next((i for i in seen if self._find(request, index, i) is None), None)
            if lacking is None:
                break
            num_blocks = lacking * group.parts
        return num_blocks

    def _find(self, request: Request, index: int, block: int) -> int | None:
        return self.pool.find(self._key(request, index, block))

    def _key(self, request: Request, index: int, block: int) -> bytes:
        """Of block `block` of the request in the group's table, whose last hash is known."""
        content = request.block_hashes[(block + 1) * self._groups[index][1][0].parts - 1]
        return content + bytes([index]) if index else content

    def record(self, request: Request, num_before: int) -> None:
        """Registers the blocks that became full since `num_before` tokens were computed."""
        if not self.enabled:
            return
        num_now = request.num_computed_tokens
        first, last = num_before // self.block_size, num_now // self.block_size
        if first == last:
            return
        self.hash(request, last)
        for index, (_, size) in self._groups:
            for i in range(num_before // size, num_now // size):
                self.pool.remember(request.block_ids[index][i], self._key(request, index, i))

    def forget(self, request: Request) -> None:
        """Removes the request's blocks, those that it lost with a preemption too."""
        for index, (group, _) in self._groups:
            num_hashed = len(request.block_hashes) // group.parts
            blocks = (self._find(request, index, i) for i in range(num_hashed))
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
