"""How tokens reach experts that other ranks hold, and how their results come back.

A rank has the tokens of its engine, which all tensor-parallel ranks of the engine have too. Names
are those of VLLM_ALL2ALL_BACKEND.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm import envs
from vllm.distributed.groups import Addend
from vllm.distributed.parallel import Parallel
from vllm.kernels.activations import Activation, unadded
from vllm.kernels.interface import MoEKernel

Exchange: TypeAlias = Callable[[MoEKernel, Any, Tensor, Tensor], Addend]
"""(kernel over this rank's experts, x [T, hidden], weights float32 [T, top_k], ids int64 of all
experts [T, top_k]) -> the sum over all experts of each token [T, hidden], which the
tensor-parallel ranks may still have to add up. x: floats, or with a single rank what the kernel
asked for."""


@dataclass(frozen=True, slots=True)
class Experts:
    """own: those of this rank among num_experts. hidden: columns of a token. takes_ue8m0: their
    kernel quantises its input to FP8 with power-of-two scales."""

    own: range
    num_experts: int
    hidden: int
    takes_ue8m0: bool = False


def make_exchange(parallel: Parallel, experts: Experts) -> Exchange:
    """The one that VLLM_ALL2ALL_BACKEND asks for; ConfigError where it cannot be had."""
    if parallel.expert.size == 1:
        return _Shares(parallel)
    backend = envs.VLLM_ALL2ALL_BACKEND
    if backend == "naive":
        return AllToAll(parallel, experts)
    if backend == "allgather_reducescatter":
        return Gathered(parallel, experts)
    from vllm.distributed.deep_ep import HighThroughput, LowLatency

    cls = LowLatency if backend == "deepep_low_latency" else HighThroughput
    return cls(parallel, experts)


class _Shares:
    """Every rank has a share of every expert, and so of the result."""

    def __init__(self, parallel: Parallel):
        self._group = parallel.tensor

    def __call__(self, kernel: MoEKernel, x: Activation, weights: Tensor, ids: Tensor) -> Addend:
        if self._group.size == 1:
            return unadded(kernel, x, weights, ids)
        return self._group.partial(kernel(x, weights, ids))


class Gathered:
    """`allgather_reducescatter`: every rank sees all tokens and computes what its experts add.

    Sizes are known to the host beforehand, so nothing waits for the device.
    """

    def __init__(self, parallel: Parallel, experts: Experts):
        self._parallel = parallel
        self._own = experts.own

    def __call__(self, kernel: MoEKernel, x: Tensor, weights: Tensor, ids: Tensor) -> Addend:
        data, tensor = self._parallel.data, self._parallel.tensor
        num_tokens = len(x)
        if data.size > 1:
            assert self._parallel.token_counts[data.rank] == num_tokens
            missing = max(self._parallel.token_counts) - num_tokens
            x, weights = pad(x, (0, 0, 0, missing)), pad(weights, (0, 0, 0, missing))
            ids = pad(ids, (0, 0, 0, missing), value=-1)
            x, weights, ids = data.all_gather(x), data.all_gather(weights), data.all_gather(ids)
        own = ids - self._own.start
        own = own.masked_fill((own < 0) | (own >= len(self._own)), -1)
        result = data.reduce_scatter(kernel(x, weights, own))
        return tensor.partial(result[:num_tokens])


class PerRank(ABC):
    """The tensor-parallel ranks of an engine, which all have its tokens, share them out first."""

    def __init__(self, parallel: Parallel, experts: Experts):
        self._tensor, self.ranks = parallel.tensor, parallel.expert
        self.experts = experts

    @abstractmethod
    def exchange(self, kernel: MoEKernel, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """As Exchange, for tokens that this rank alone has; there may be none."""

    def __call__(self, kernel: MoEKernel, x: Tensor, weights: Tensor, ids: Tensor) -> Addend:
        num_tokens, size = len(x), -(-len(x) // self._tensor.size)
        own = slice(self._tensor.rank * size, (self._tensor.rank + 1) * size)
        result = self.exchange(kernel, x[own], weights[own], ids[own])
        if self._tensor.size == 1:
            return result
        filled = pad(result, (0, 0, 0, size - len(result)))
        return self._tensor.all_gather(filled)[:num_tokens]


class AllToAll(PerRank):
    """`naive`: each row goes to the ranks of its experts alone, and comes back once for each.

    The host waits for the counts. Results are added up where the token belongs, in the order of its
    experts, so they are those of a single rank, bit for bit.
    """

    def exchange(self, kernel: MoEKernel, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        top_k, num_own = ids.shape[1], len(self.experts.own)
        chosen = ids.flatten()
        order = chosen.argsort(stable=True)  # by expert, and with that by rank
        targets = chosen // num_own
        counts = torch.bincount(targets, minlength=self.ranks.size)
        ones = [1] * self.ranks.size
        sent, received = counts.tolist(), self.ranks.all_to_all(counts, ones, ones).tolist()
        rows = self.ranks.all_to_all(x[order // top_k], sent, received)
        experts = self.ranks.all_to_all(chosen[order], sent, received) - self.experts.own.start
        results = rows
        if len(rows):
            alone = torch.ones(len(rows), 1, dtype=torch.float32, device=x.device)
            results = kernel(rows, alone, experts.unsqueeze(1))
        returned = self.ranks.all_to_all(results, received, sent)
        by_token = torch.empty_like(returned)
        by_token[order] = returned
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        by_column = by_token.view(len(x), top_k, x.shape[1]).unbind(1)
        for weight, result in zip(weights.unbind(1), by_column):
            total += result.float() * weight[:, None]
        return total.to(x.dtype)
