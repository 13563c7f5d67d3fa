"""Which experts a token goes to, and how much each of them counts: the reference."""

import torch
from torch import Tensor

from vllm.architectures.router import Router
from vllm.kernels.interface import LinearKernel


def choose_experts(
    x: Tensor, gate: LinearKernel, router: Router, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`route` of gate(x), for x [T, hidden]; and what gate(x) has beyond the experts' columns."""
    logits, others = gate(x).tensor_split([router.num_experts], 1)
    return *route(logits, bias=bias, **router.arguments()), others


def route(
    logits: Tensor,
    top_k: int,
    renormalise: bool,
    *,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    routed_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The `top_k` best experts of logits [T, E]: float32 weights and int64 ids [T, top_k].

    Best first, as `Router` says, in float32; bias: float32 [E]. A group counts as its best expert,
    with a bias as the sum of its two best.
    """
    wide = logits.float()
    # In float64: torch rounds the last elements of a tensor, which it does not compute as vectors,
    # otherwise, and a token's scores would depend on the batch.
    scores = wide.double().sigmoid().float() if scoring == "sigmoid" else wide.softmax(-1)
    choice = scores if bias is None else scores + bias
    if num_groups > 1:
        groups = choice.unflatten(-1, (num_groups, -1))
        best = groups.topk(1 if bias is None else 2, -1).values.sum(-1)
        is_kept = torch.zeros_like(best, dtype=torch.bool)
        is_kept.scatter_(-1, best.topk(topk_groups, -1).indices, True)
        choice = groups.masked_fill(~is_kept.unsqueeze(-1), float("-inf")).flatten(-2)
    ids = choice.topk(top_k, -1).indices
    weights = scores.gather(-1, ids)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights if routed_scale == 1 else weights * routed_scale, ids
