"""Which experts a token goes to, and how much each of them counts."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm.errors import CheckpointError
from vllm.kernels.interface import LinearKernel


@dataclass(frozen=True, slots=True)
class Routing:
    """How the router of a model chooses among num_experts; the rest as `route` takes it.
    CheckpointError for what has no meaning."""

    num_experts: int
    top_k: int
    renormalise: bool
    is_sigmoid: bool = False
    num_groups: int = 1
    kept_groups: int = 1
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.top_k > self.num_experts:
            raise CheckpointError(
                f"config.json: num_experts_per_tok = {self.top_k} is more than num_experts = "
                f"{self.num_experts}"
            )
        if self.num_experts % self.num_groups or not 1 <= self.kept_groups <= self.num_groups:
            raise CheckpointError(
                f"config.json: topk_group = {self.kept_groups} of n_group = {self.num_groups} "
                f"groups of {self.num_experts} experts; accepted: an n_group that divides the "
                f"experts, and from 1 to n_group of them"
            )
        kept = self.num_experts // self.num_groups * self.kept_groups
        if self.top_k > kept:
            raise CheckpointError(
                f"config.json: num_experts_per_tok = {self.top_k}, but topk_group = "
                f"{self.kept_groups} of n_group = {self.num_groups} groups leave {kept} of "
                f"{self.num_experts} experts to choose from; accepted: up to {kept}, or a larger "
                f"topk_group"
            )

    def arguments(self) -> dict[str, Any]:
        """Of `route`, besides logits and bias."""
        names = ("top_k", "renormalise", "is_sigmoid", "num_groups", "kept_groups", "factor")
        return {name: getattr(self, name) for name in names}


def choose_experts(
    x: Tensor, gate: LinearKernel, routing: Routing, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`route` of gate(x), for x [T, hidden]; and what gate(x) has beyond the experts' columns."""
    logits, others = gate(x).tensor_split([routing.num_experts], 1)
    return *route(logits, bias=bias, **routing.arguments()), others


def route(
    logits: Tensor,
    top_k: int,
    renormalise: bool,
    *,
    is_sigmoid: bool = False,
    bias: Tensor | None = None,
    num_groups: int = 1,
    kept_groups: int = 1,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The `top_k` best experts of logits [T, E]: float32 weights and int64 ids [T, top_k].

    Best first. Scores are softmax(logits), or sigmoid(logits), in float32. Chosen are the best of
    score + bias (float32 [E]) out of the `kept_groups` best of `num_groups` equal groups: a group
    counts as its best expert, with a bias as the sum of its two best. Weights are the scores
    without the bias, divided by their sum for a token (renormalise), times `factor`. The kept
    groups have at least `top_k` experts.
    """
    wide = logits.float()
    scores = wide.sigmoid() if is_sigmoid else wide.softmax(-1)
    choice = scores if bias is None else scores + bias
    if num_groups > 1:
        groups = choice.unflatten(-1, (num_groups, -1))
        best = groups.topk(1 if bias is None else 2, -1).values.sum(-1)
        is_kept = torch.zeros_like(best, dtype=torch.bool)
        is_kept.scatter_(-1, best.topk(kept_groups, -1).indices, True)
        choice = groups.masked_fill(~is_kept.unsqueeze(-1), float("-inf")).flatten(-2)
    ids = choice.topk(top_k, -1).indices
    weights = scores.gather(-1, ids)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights if factor == 1 else weights * factor, ids
