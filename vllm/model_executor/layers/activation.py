"""Activation functions of gated MLPs."""

from torch import Tensor, nn

from vllm.kernels.activations import Activation
from vllm.model_executor.context import ModelContext
from vllm.model_executor.layers.linear import Linear


class SiluAndMul(nn.Module):
    """silu(x[:, :I]) * x[:, I:] for x [T, 2I]."""

    def __init__(self, ctx: ModelContext):
        super().__init__()
        self.ops = ctx.ops

    def forward(self, x: Tensor, reader: Linear | None = None) -> Activation:
        """reader: the layer that alone reads the result, which may want it quantised."""
        quant = reader and reader.input_quant(x.shape[0])
        return quant.silu_and_mul(x) if quant else self.ops.silu_and_mul(x)
