"""Groups of ranks and what they do together. With one rank every operation is the identity."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from vllm.errors import is_out_of_memory

if TYPE_CHECKING:
    from vllm.distributed.custom_all_reduce import PeerSums
    from vllm.kernels.activations import Activation, InputQuant, UnaddedRows

# torch 2.13 renamed it; 2.11 knows the old name alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class PeerError(RuntimeError):
    """Another rank is gone, or did not come in time: the cause is to be found there."""


def wait_for(event: torch.cuda.Event, timeout_s: float | None) -> None:
    """Returns when the GPU has come to `event`. Collectives run on the GPU, and one whose peer is
    stuck never ends: PeerError after timeout_s, which is None where there is no peer."""
    if timeout_s is None:
        event.synchronize()
        return
    end = time.monotonic() + timeout_s
    while not event.query():
        if time.monotonic() > end:
            raise PeerError(f"a step was not over after {timeout_s:g} s: a rank timed out")


class Group:
    """Rank `rank` of `size`. ranks: what the world calls them. handle: torch's process group.
    peer_sums: for few rows on GPUs of one machine; None where there is no such way.

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
        self.peer_sums: PeerSums | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        if self.peer_sums is not None and self.peer_sums.takes(x):
            return self.peer_sums.add_up(x)
        if self.size > 1:
            with self._peers("all-reduce"):
                dist.all_reduce(x, group=self.handle)
        return x

    def partial(self, x: Tensor) -> "Addend":
        """x of every rank, which whoever reads it adds up."""
        return PartialSum(x, self) if self.size > 1 else x

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
            if is_out_of_memory(error):
                raise
            others = ", ".join(str(rank) for rank in self.ranks if rank != self.ranks[self.rank])
            raise PeerError(f"{operation} with rank {others} failed: {error}") from error


@dataclass(frozen=True, slots=True)
class PartialSum:
    """values [T, n] of each rank of `group`, to be added up by who reads them: a norm that comes
    next can do both at once."""

    values: Tensor
    group: Group

    def total(self) -> Tensor:
        return self.group.all_reduce(self.values)

    def add_rms_norm(
        self, residual: Tensor, weight: Tensor, eps: float, quant: "InputQuant | None"
    ) -> "Activation | None":
        """residual += the sum, in place, then the norm of residual, quantised if `quant` says how,
        in one kernel; None where there is no such kernel."""
        sums = self.group.peer_sums
        if sums is None or not sums.takes(self.values):
            return None
        if quant is not None:
            if not sums.can_quantise():
                return None
            return quant.sum_and_norm(sums, self.values, residual, weight, eps)
        sums.add_rms_norm(self.values, residual, weight, eps)
        return self.values


Addend: TypeAlias = "Tensor | PartialSum | UnaddedRows"
"""[T, n] that is to be added to a residual."""


def total(x: Addend) -> Tensor:
    return x if isinstance(x, Tensor) else x.total()


def own_part(x: Addend) -> Tensor:
    """What this rank has of it, to be looked at or scaled."""
    return x.values if isinstance(x, PartialSum) else x


def add(x: Addend, y: Addend) -> Addend:
    """x + y, in place of x. Of two parts on each rank there is one sum over the ranks to come."""
    if isinstance(x, PartialSum) and isinstance(y, PartialSum):
        assert x.group is y.group
        x.values.add_(y.values)
        return x
    if isinstance(x, Tensor | PartialSum):
        return total(x).add_(total(y))
    return x.plus(total(y))
