"""Queries that grow with their position."""

import torch
from torch import Tensor

from vllm.architectures.decoder import QueryScaling
from vllm.model_executor.context import ModelContext


class ScaledQueries:
    """q [T, heads, n] and positions [T] -> q times the scale of its position, which is rounded to
    q's type. scaling: None leaves q as it is."""

    def __init__(self, ctx: ModelContext, scaling: QueryScaling | None):
        # Where no position reaches the first step of the formula, the scale is 1 everywhere.
        last = ctx.max_model_len - 1
        is_reached = scaling is not None and last + scaling.first >= scaling.original_length
        self.scaling = scaling if is_reached else None

    def __call__(self, q: Tensor, positions: Tensor) -> Tensor:
        if (scaling := self.scaling) is None:
            return q
        steps = torch.floor((positions + scaling.first) / scaling.original_length)
        return q * (1 + scaling.beta * torch.log1p(steps)).to(q.dtype)[:, None, None]
