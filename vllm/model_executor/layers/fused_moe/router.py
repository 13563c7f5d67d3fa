"""Which experts a token goes to, and how much each of them counts."""

import torch
from torch import Tensor


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
    without the bias, divided by their sum for a token (renormalise), times `factor`.
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
