"""Choices of experts that kernels are timed with: drawn beforehand, with fixed seeds."""

import torch
from torch import Tensor

from vllm.kernels.select.problem import MoEProblem

# Odds of the p-th most popular expert are p ** -exponent.
EVEN, SKEWED = 0.0, 1.2


def draws(
    problem: MoEProblem, num_tokens: int, count: int, exponent: float, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """`count` batches of (weights float32, ids int64) [T, top_k], as a MoEKernel takes them.

    Tokens choose among the experts of all ranks; those of others are -1, so that this rank has
    T * top_k / ranks pairs on average. Experts are dealt out to ranks by popularity, and this is
    the first, so that its share is as large as any. Which of its experts is the popular one changes
    from batch to batch: one that was just read from memory is in the cache.
    """
    ranks, own = problem.cut_experts, problem.num_experts // problem.cut_experts
    odds = torch.arange(1, problem.num_experts + 1, device=device) ** -exponent
    found = []
    for seed in range(count):
        generator = torch.Generator(device).manual_seed(seed)
        # The least of exponential variables at these rates is at a place with these odds.
        race = torch.empty(num_tokens, problem.num_experts, device=device)
        race.exponential_(generator=generator)
        popularity = (race / odds).topk(problem.top_k, largest=False).indices
        order = torch.randperm(own, generator=generator, device=device)
        ids = torch.where(popularity % ranks == 0, order[popularity // ranks], -1)
        weights = torch.rand(ids.shape, generator=generator, device=device)
        found.append((weights / weights.sum(1, keepdim=True), ids))
    return found
