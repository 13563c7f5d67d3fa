"""Copies of recurrent states, for requests that begin like an earlier one.

K and V of a prefix are found block by block, a recurrent state only where it was kept: after a
whole number of blocks, in a slot of its own beside those of running requests. It is known by the
hash of the last of these blocks, which stands for all tokens from the beginning.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

LEAST_TOKENS = 128
"""A step is cut in two to keep a state; for fewer tokens than this it is not."""


class StateSnapshots:
    """Which slot holds the state after which tokens. The one not used for longest goes first.

    What a step keeps is found from the next step on: a step copies states into its requests before
    it computes, and out of them after.
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
        """The most blocks, of those that begin a request, after which the state is kept, and its
        slot; (0, 0) where it never is."""
        for count in range(len(hashes), 0, -1):
            slot = self._slot_of.get(hashes[count - 1])
            if slot is not None:
                self._slot_of.move_to_end(hashes[count - 1])
                return count, slot
        return 0, 0

    def keep(self, content: bytes) -> int | None:
        """The slot to copy the state after `content` to; None where it is kept already, or this
        step has taken all slots."""
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
