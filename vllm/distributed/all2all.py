"""All2all between expert-parallel ranks: dispatch tokens to experts, combine the results.

Tensor-parallel ranks of an engine all hold the engine's tokens. Backend names are those of
VLLM_ALL2ALL_BACKEND.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm.distributed.groups import Addend
from vllm.distributed.parallel import Parallel
from vllm.kernels.interface import MoEKernel

All2All: TypeAlias = Callable[[MoEKernel, Any, Tensor, Tensor], Addend]
"""(kernel over this rank's experts, x [T, hidden], weights float32 [T, top_k], global expert ids
int64 [T, top_k]) -> the sum over all experts of each token [T, hidden], possibly partial over the
tensor-parallel ranks. x is a float tensor; with one rank it may be the kernel's quantised input."""


@dataclass(frozen=True, slots=True)
class Experts:
    """own: local experts among num_experts. hidden: hidden size."""

    own: range
    num_experts: int
    hidden: int


class AllGatherReduceScatter:
    """`allgather_reducescatter`: all-gather the tokens, run the local experts, reduce-scatter. The
    host knows all sizes, so there is no device synchronisation."""

    def __init__(self, parallel: Parallel, experts: Experts):
        self._parallel = parallel
        self._own = experts.own

    def __call__(self, kernel: MoEKernel, x: Tensor, weights: Tensor, ids: Tensor) -> Addend:
        data, tensor = self._parallel.data, self._parallel.tensor
        num_tokens = len(x)
        if data.size > 1:
            assert self._parallel.num_tokens_across_dp[data.rank] == num_tokens
            missing = max(self._parallel.num_tokens_across_dp) - num_tokens
            x, weights = pad(x, (0, 0, 0, missing)), pad(weights, (0, 0, 0, missing))
            ids = pad(ids, (0, 0, 0, missing), value=-1)
            x, weights, ids = data.all_gather(x), data.all_gather(weights), data.all_gather(ids)
        own = ids - self._own.start
        own = own.masked_fill((own < 0) | (own >= len(self._own)), -1)
        result = data.reduce_scatter(kernel(x, weights, own))
        return tensor.partial(result[:num_tokens])


class PerRankAll2All(ABC):
    """Splits an engine's tokens over its tensor-parallel ranks before the all2all."""

    def __init__(self, parallel: Parallel, experts: Experts):
        self._tensor, self.ranks = parallel.tensor, parallel.expert
        self.experts = experts

    @abstractmethod
    def all2all(self, kernel: MoEKernel, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """As All2All, for the tokens of this rank alone; there may be none."""

    def __call__(self, kernel: MoEKernel, x: Tensor, weights: Tensor, ids: Tensor) -> Addend:
        num_tokens, size = len(x), -(-len(x) // self._tensor.size)
        own = slice(self._tensor.rank * size, (self._tensor.rank + 1) * size)
        result = self.all2all(kernel, x[own], weights[own], ids[own])
        if self._tensor.size == 1:
            return result
        filled = pad(result, (0, 0, 0, size - len(result)))
        return self._tensor.all_gather(filled)[:num_tokens]


class NaiveAll2All(PerRankAll2All):
    """`naive`: sends one row per chosen expert and returns one result row for each.

    The host waits for the counts. The token's own rank adds up the results in the order of its
    experts, so the sum is bit-identical to that of a single rank.
    """

    def all2all(self, kernel: MoEKernel, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
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
