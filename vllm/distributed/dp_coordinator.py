"""Data-parallel ranks step in lock-step under expert parallelism, because each holds experts that
the others route to."""

from datetime import timedelta

import torch
import torch.distributed as dist

from vllm.distributed.groups import PeerError


class DPCoordinator:
    """Exchanges, before every step, how many tokens each data-parallel rank computes in it.

    Without work all ranks are paused and exchange nothing. The front end numbers the requests
    ("waves") and announces each number to every rank. A rank runs from the announcement on. All
    ranks pause together, after a step in which none had work and all had seen the same number, so
    no rank waits for a paused one.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float):
        self.is_running = False
        self._last_wave = 0
        self._size = size
        # Loading the configuration may take longer than the timeout of a step.
        store.set(f"engine/{rank}", b"here")
        store.wait([f"engine/{other}" for other in range(size)])
        timeout = timedelta(seconds=timeout_s)
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("engines", store), rank, size, timeout)

    def start_wave(self, number: int) -> None:
        """A request was sent to one of the ranks. number: equal on all that know of it."""
        self._last_wave = number
        self.is_running = True

    def sync(
        self, num_tokens: int, has_work: bool, is_decode: bool
    ) -> tuple[tuple[int, ...], bool]:
        """Takes this rank's counts of the step; returns the number of tokens on each rank and
        whether all ranks only decode. Waits for all ranks."""
        own = torch.tensor([num_tokens, has_work, is_decode, self._last_wave], device="cpu")
        every = [torch.empty_like(own) for _ in range(self._size)]
        try:
            self._group.allgather([every], [own]).wait()
        except RuntimeError as error:
            raise PeerError(f"another data-parallel rank is gone or stuck: {error}") from error
        counts, works, decodes, waves = zip(*(values.tolist() for values in every))
        self.is_running = any(works) or len(set(waves)) > 1
        return counts, all(decodes)
