"""Snapshots of recurrent states, for prefix caching.

K and V of a prefix are cached per block, a recurrent state only where a snapshot was saved: after a
whole number of blocks, in a slot of its own after those of running requests. Its key is the hash of
the last of these blocks, which covers the whole prefix.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

LEAST_TOKENS = 128
"""Saving a snapshot splits a step in two; not worth it for fewer tokens."""


class StateSnapshots:
    """Maps prefix hashes to snapshot slots, with LRU eviction.

    A snapshot is available from the next step on: a step restores states before it computes and
    saves them after.
    """

    def __init__(self, slots: Iterable[int], least_tokens: int = LEAST_TOKENS):
        self.least_tokens = least_tokens
        self._free = list(slots)
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        self._kept_now: dict[bytes, int] = {}

    def begin_step(self) -> None:
        self._slot_of |= self._kept_now
        self._kept_now = {}

    def find(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """The longest prefix of `hashes` that ends at a snapshot, in blocks, and its slot; (0, 0)
        for none."""
        for count in range(len(hashes), 0, -1):
            slot = self._slot_of.get(hashes[count - 1])
            if slot is not None:
                self._slot_of.move_to_end(hashes[count - 1])
                return count, slot
        return 0, 0

    def keep(self, content: bytes) -> int | None:
        """The slot to save the state after `content` to; None where it has a snapshot, or this
        step uses all slots."""
        if content in self._slot_of or content in self._kept_now:
            return None
        if not self._free and not self._slot_of:
            return None
        slot = self._free.pop() if self._free else self._slot_of.popitem(last=False)[1]
        self._kept_now[content] = slot
        return slot

    def forget(self, contents: Iterable[bytes]) -> None:
        for content in contents:
            for kept in (self._slot_of, self._kept_now):
                slot = kept.pop(content, None)
                if slot is not None:
                    self._free.append(slot)

    def forget_all(self) -> None:
        self.forget([*self._slot_of, *self._kept_now])
