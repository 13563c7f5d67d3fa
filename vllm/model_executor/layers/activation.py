"""Activation functions of gated MLPs."""

from torch import Tensor, nn

from vllm.errors import CheckpointError
from vllm.model_executor.context import ModelContext


class SiluAndMul(nn.Module):
    """silu(x[:, :I]) * x[:, I:] for x [T, 2I]."""

    def __init__(self, ctx: ModelContext):
        super().__init__()
        if ctx.hf_config.hidden_act not in ("silu", "swish"):
            raise CheckpointError(
                f"hidden_act {ctx.hf_config.hidden_act!r} is not supported: it takes silu"
            )
        self.ops = ctx.ops

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.silu_and_mul(x)
