"""Reuse of KV blocks between requests that begin alike.

A full block is known by a hash over its tokens and the hash of the block before it, so equal
hashes mean equal tokens from the very beginning. SHA-256, because a collision would show one
user's context to another.
"""

from array import array
from hashlib import sha256

from vllm.engine.block_pool import BlockPool
from vllm.engine.request import Request


class PrefixCache:
    """Finds and records blocks in `pool`. num_queried and num_hit count tokens since the start."""

    def __init__(self, pool: BlockPool, block_size: int, enabled: bool):
        self.pool = pool
        self.block_size = block_size
        self.enabled = enabled
        self.num_queried = 0
        self.num_hit = 0

    def match(self, request: Request) -> list[int]:
        """The cached blocks that `request` begins with; the last token is never among them.

        That one must be computed anyway: its logits give the next token.
        """
        if not (self.enabled and request.reads_prefix_cache):
            return []
        num_blocks = (len(request.all_token_ids) - 1) // self.block_size
        blocks = []
        for content in self.hashes(request, num_blocks):
            block = self.pool.find(content)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count(self, num_queried: int, num_hit: int) -> None:
        self.num_queried += num_queried
        self.num_hit += num_hit

    def record(self, request: Request, num_before: int) -> None:
        """Remembers the blocks that filled up since `num_before` tokens were computed."""
        if not self.enabled:
            return
        first, last = num_before // self.block_size, request.num_computed_tokens // self.block_size
        if first == last:
            return
        hashes = self.hashes(request, last)
        for i in range(first, last):
            self.pool.remember(request.block_ids[i], hashes[i])

    def hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """Of its first blocks; it has that many full ones."""
        hashes, size = request.block_hashes, self.block_size
        while len(hashes) < num_blocks:
            start = len(hashes) * size
            tokens = array("q", request.all_token_ids[start : start + size])
            previous = hashes[-1] if hashes else b""
            hashes.append(sha256(previous + tokens.tobytes()).digest())
        return hashes[:num_blocks]
