"""Engines that compute every step together, because each has experts that the others need."""

from datetime import timedelta

import torch
import torch.distributed as dist

from vllm.distributed.groups import PeerError


class LockStep:
    """Agrees with the other engines, before every step, on what each computes in it.

    While no engine has work all of them rest, and none asks the others for anything. Whoever hands
    out requests numbers them and tells every engine each number. An engine runs from the moment it
    hears one, and all rest again together: after a step in which none had work and all had heard
    the same number. So none waits for one that rests and knows nothing of the work.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float):
        self.is_running = False
        self._last_number = 0
        self._size = size
        # One may read its configuration for longer than an engine waits for another in a step.
        store.set(f"engine/{rank}", b"here")
        store.wait([f"engine/{other}" for other in range(size)])
        timeout = timedelta(seconds=timeout_s)
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("engines", store), rank, size, timeout)

    def hear(self, number: int) -> None:
        """Request `number` was handed to one of the engines."""
        self._last_number = max(self._last_number, number)
        self.is_running = True

    def agree(
        self, num_tokens: int, has_work: bool, is_decode: bool
    ) -> tuple[tuple[int, ...], bool]:
        """Given what this engine computes now: tokens that each engine does, and whether all only
        decode. Waits for all engines."""
        own = torch.tensor([num_tokens, has_work, is_decode, self._last_number], device="cpu")
        every = [torch.empty_like(own) for _ in range(self._size)]
        try:
            self._group.allgather([every], [own]).wait()
        except RuntimeError as error:
            raise PeerError(f"another engine is gone or stuck: {error}") from error
        counts, works, decodes, numbers = zip(*(values.tolist() for values in every))
        self.is_running = any(works) or len(set(numbers)) > 1
        return counts, all(decodes)
