"""Groups of ranks and what they do together. With one rank every operation is the identity."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed it; 2.11 knows the old name alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class PeerError(RuntimeError):
    """Another rank is gone, or did not come in time: the cause is to be found there."""


class Group:
    """Rank `rank` of `size`. ranks: what the world calls them. handle: torch's process group.

    Every operation must be called by all ranks of the group, in the same order. It raises
    PeerError when a rank is gone or does not come in time.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        ranks: tuple[int, ...] = (0,),
        handle: "dist.ProcessGroup | None" = None,
    ):
        self.rank = rank
        self.size = size
        self.ranks = ranks
        self.handle = handle

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        if self.size > 1:
            with self._peers("all-reduce"):
                dist.all_reduce(x, group=self.handle)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """x [n, ...] of every rank, one after the other: [size * n, ...]."""
        if self.size == 1:
            return x
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        with self._peers("all-gather"):
            _all_gather(out, x.contiguous(), group=self.handle)
        return out

    def gather_columns(self, x: Tensor) -> Tensor:
        """x [n, m] of every rank side by side: [n, size * m]."""
        if self.size == 1:
            return x
        gathered = self.all_gather(x).view(self.size, *x.shape)
        return gathered.transpose(0, 1).reshape(x.shape[0], -1)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """x [size * n, ...] -> [n, ...]: of the sum over the ranks, this rank's piece."""
        if self.size == 1:
            return x
        out = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        with self._peers("reduce-scatter"):
            _reduce_scatter(out, x.contiguous(), group=self.handle)
        return out

    def all_to_all(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """x [sum(sent), ...], for rank i the next sent[i] rows -> [sum(received), ...]."""
        if self.size == 1:
            return x
        out = x.new_empty(sum(received), *x.shape[1:])
        with self._peers("all-to-all"):
            dist.all_to_all_single(out, x.contiguous(), received, sent, group=self.handle)
        return out

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """x of rank `source` of this group, into x."""
        if self.size > 1:
            with self._peers("broadcast"):
                dist.broadcast(x, self.ranks[source], group=self.handle)
        return x

    def send(self, x: Tensor, to: int) -> None:
        with self._peers("send"):
            dist.send(x.contiguous(), self.ranks[to], group=self.handle)

    def receive(self, x: Tensor, source: int) -> Tensor:
        with self._peers("receive"):
            dist.recv(x, self.ranks[source], group=self.handle)
        return x

    def least(self, value: float) -> float:
        """The smallest of the ranks' values. Waits for the result, over the host's network."""
        if self.size == 1:
            return value
        values = torch.tensor([value], dtype=torch.float64, device="cpu")
        with self._peers("all-reduce"):
            dist.all_reduce(values, dist.ReduceOp.MIN, group=self.handle)
        return float(values)

    def greatest(self, value: float) -> float:
        """The largest of the ranks' values."""
        return -self.least(-value)

    @contextmanager
    def _peers(self, operation: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if "out of memory" in str(error):
                raise
            others = ", ".join(str(rank) for rank in self.ranks if rank != self.ranks[self.rank])
            raise PeerError(f"{operation} with rank {others} failed: {error}") from error
