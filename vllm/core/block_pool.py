"""KV cache blocks: reference counted; free blocks keep their content in LRU order."""

from collections import OrderedDict


class BlockPool:
    """Hands out block ids from 0 to num_blocks - 1.

    A full block may have the hash of its content. When its last user releases it, it becomes the
    most recently used free block and keeps its content until it is allocated again. Blocks are
    allocated in LRU order, those without a hash first.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._num_users = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_hash: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Allocates `count` blocks to one user; the caller has checked `num_free`."""
        assert count <= len(self._free)
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._num_users[block] = 1
            taken.append(block)
        return taken

    def share(self, block: int) -> None:
        """Adds a user to a block found by its hash."""
        if self._num_users[block] == 0:
            del self._free[block]
        self._num_users[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Removes a user from each; of blocks in order of position, the last are reused first."""
        for block in reversed(blocks):
            assert self._num_users[block] > 0
            self._num_users[block] -= 1
            if self._num_users[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def find(self, content: bytes) -> int | None:
        """The block that holds `content`, in use or free."""
        return self._by_hash.get(content)

    def is_free(self, block: int) -> bool:
        return self._num_users[block] == 0

    def remember(self, block: int, content: bytes) -> None:
        """Registers the hash of a full block, unless a block of equal content has it."""
        if content not in self._by_hash:
            self._forget(block)
            self._by_hash[content] = block
            self._hash_of[block] = content

    def forget(self, blocks: list[int]) -> None:
        """Unregisters the hashes of blocks; their users keep them."""
        for block in blocks:
            self._forget(block)

    def forget_all(self) -> None:
        """Unregisters every hash."""
        self.forget(list(self._by_hash.values()))

    def _forget(self, block: int) -> None:
        content = self._hash_of[block]
        if content is not None:
            del self._by_hash[content]
            self._hash_of[block] = None

    def check_idle(self) -> None:
        """AssertionError where a block has a user; called when there is no request."""
        used = [block for block, users in enumerate(self._num_users) if users]
        assert not used, f"{len(used)} blocks are still in use with no request: {used[:8]}"
        assert len(self._free) == self.num_blocks
        assert all(self._hash_of[block] == content for content, block in self._by_hash.items())
