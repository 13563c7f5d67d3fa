"""Prefix caching: requests with a common prefix share KV blocks.

The hash of a full block covers its tokens and the hash of the block before it, so equal hashes mean
equal prefixes and an equal salt, where requests have one. SHA-256, because a collision would leak
one user's context to another.
"""

from array import array
from hashlib import sha256

from vllm.core.block_pool import BlockPool
from vllm.core.request import Request


def _root(salt: str | None) -> bytes:
    """What the first block's hash covers besides its tokens."""
    return b"" if salt is None else sha256(salt.encode()).digest()


class PrefixCache:
    """Finds and records blocks in `pool`. num_queried and num_hit count tokens since the start."""

    def __init__(self, pool: BlockPool, block_size: int, enabled: bool):
        self.pool = pool
        self.block_size = block_size
        self.enabled = enabled
        self.num_queried = 0
        self.num_hit = 0

    def match(self, request: Request) -> list[int]:
        """The cached blocks of the request's prefix, without its last token, which is always
        computed, for its logits."""
        # Prompt logprobs need every prompt position computed.
        if not self.enabled or request.sampling.prompt_logprobs is not None:
            return []
        num_blocks = (len(request.all_token_ids) - 1) // self.block_size
        blocks = []
        for i in range(num_blocks):
            self.hash(request, i + 1)  # no further than needed: the step waits for this
            block = self.pool.find(request.block_hashes[i])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def record(self, request: Request, num_before: int) -> None:
        """Registers the blocks that became full since `num_before` tokens were computed."""
        if not self.enabled:
            return
        first, last = num_before // self.block_size, request.num_computed_tokens // self.block_size
        if first == last:
            return
        self.hash(request, last)
        for i in range(first, last):
            self.pool.remember(request.block_ids[i], request.block_hashes[i])

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
