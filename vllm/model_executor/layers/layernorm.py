"""RMSNorm, alone or with the residual addition before it."""

import torch
from torch import Tensor, nn

from vllm.model_executor.context import ModelContext
from vllm.model_executor.weights import FLOATS, Slot, copy_into, empty_parameter


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32."""

    def __init__(self, ctx: ModelContext, prefix: str, size: int):
        super().__init__()
        self.prefix = prefix
        self.eps = float(ctx.hf_config.rms_norm_eps)
        self.ops = ctx.ops
        self.weight = empty_parameter(size, dtype=torch.float32)

    def slots(self) -> dict[str, Slot]:
        slot = Slot(tuple(self.weight.shape), FLOATS, copy_into(self.weight.data))
        return {f"{self.prefix}.weight": slot}

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual += x, then the norm of residual; in place of both."""
        self.ops.fused_add_rms_norm(x, residual, self.weight, self.eps)
        return x
