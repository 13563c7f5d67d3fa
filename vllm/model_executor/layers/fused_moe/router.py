"""Which experts a token goes to, and how much each of them counts."""

import torch
from torch import Tensor


def route(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """The `top_k` likeliest of softmax(logits [T, E]): float32 weights and int64 ids [T, top_k].

    Likeliest first. renormalise: the weights of a token add up to 1.
    """
    weights, ids = torch.softmax(logits, -1, dtype=torch.float32).topk(top_k, -1)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids
