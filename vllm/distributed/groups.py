"""Process groups and their collectives. With one rank every collective is the identity."""

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
    from vllm.kernels.activations import Activation, FusedAllReduce, InputQuant, UnaddedRows

# torch 2.13 renamed it; 2.11 knows the old name alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class PeerError(RuntimeError):
    """Another rank is gone or timed out: the cause is there."""


def wait_for(event: torch.cuda.Event, timeout_s: float | None) -> None:
    """Returns when the GPU has reached `event`. A collective whose peer is stuck never ends, so
    PeerError is raised after timeout_s; None where there is no peer."""
    if timeout_s is None:
        event.synchronize()
        return
    end = time.monotonic() + timeout_s
    while not event.query():
        if time.monotonic() > end:
            raise PeerError(f"a step was not over after {timeout_s:g} s: a rank timed out")


class Group:
    """Rank `rank` of `size`. ranks: their global ranks. handle: torch's process group.
    custom_all_reduce: for small tensors on GPUs of one node; None where it is not available.

    All ranks of the group must call the same collectives in the same order. A collective raises
    PeerError when a rank is gone or times out.
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
        self.custom_all_reduce: FusedAllReduce | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        if self.custom_all_reduce is not None and self.custom_all_reduce.takes(x):
            return self.custom_all_reduce.all_reduce(x)
        if self.size > 1:
            with self._peers("all-reduce"):
                dist.all_reduce(x, group=self.handle)
        return x

    def partial(self, x: Tensor) -> "Addend":
        """x of every rank as a sum whose reader does the all-reduce."""
        return PartialSum(x, self) if self.size > 1 else x

    def all_gather(self, x: Tensor) -> Tensor:
        """x [n, ...] of every rank, concatenated along the rows: [size * n, ...]."""
        if self.size == 1:
            return x
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        with self._peers("all-gather"):
            _all_gather(out, x.contiguous(), group=self.handle)
        return out

    def gather_columns(self, x: Tensor) -> Tensor:
        """x [n, m] of every rank, concatenated along the columns: [n, size * m]."""
        if self.size == 1:
            return x
        gathered = self.all_gather(x).view(self.size, *x.shape)
        return gathered.transpose(0, 1).reshape(x.shape[0], -1)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """x [size * n, ...] -> [n, ...]: this rank's shard of the sum over the ranks."""
        if self.size == 1:
            return x
        out = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        with self._peers("reduce-scatter"):
            _reduce_scatter(out, x.contiguous(), group=self.handle)
        return out

    def all_to_all(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """x [sum(sent), ...]; rank i gets the next sent[i] rows -> [sum(received), ...]."""
        if self.size == 1:
            return x
        out = x.new_empty(sum(received), *x.shape[1:])
        with self._peers("all-to-all"):
            dist.all_to_all_single(out, x.contiguous(), received, sent, group=self.handle)
        return out

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Overwrites x with that of rank `source` of this group."""
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
        """The smallest of the ranks' values, over the host network. Blocks."""
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
    """values [T, n] of each rank of `group`, not all-reduced yet: a following norm can fuse the
    all-reduce."""

    values: Tensor
    group: Group

    def total(self) -> Tensor:
        return self.group.all_reduce(self.values)

    def add_rms_norm(
        self, residual: Tensor, weight: Tensor, eps: float, quant: "InputQuant | None"
    ) -> "Activation | None":
        """residual += the sum, in place, then the norm of residual, quantised if `quant` is given,
        in one kernel; None where there is no such kernel."""
        sums = self.group.custom_all_reduce
        if sums is None or not sums.takes(self.values):
            return None
        if quant is not None:
            if not sums.can_quantise():
                return None
            return quant.sum_and_norm(sums, self.values, residual, weight, eps)
        sums.add_rms_norm(self.values, residual, weight, eps)
        return self.values


Addend: TypeAlias = "Tensor | PartialSum | UnaddedRows"
"""[T, n] to add to a residual."""


def total(x: Addend) -> Tensor:
    return x if isinstance(x, Tensor) else x.total()


def own_part(x: Addend) -> Tensor:
    """This rank's addend, to be inspected or scaled."""
    return x.values if isinstance(x, PartialSum) else x


def add(x: Addend, y: Addend) -> Addend:
    """x + y, in place of x. Two PartialSums are added before their one all-reduce."""
    if isinstance(x, PartialSum) and isinstance(y, PartialSum):
        assert x.group is y.group
        x.values.add_(y.values)
        return x
    if isinstance(x, Tensor | PartialSum):
        return total(x).add_(total(y))
    return x.plus(total(y))
