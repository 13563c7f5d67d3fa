"""Activation functions of gated MLPs."""

from typing import Any

from torch import Tensor, nn

from vllm.errors import CheckpointError
from vllm.kernels.activations import Activation
from vllm.model_executor.context import ModelContext
from vllm.model_executor.layers.linear import Linear


def check_activation(config: Any) -> None:
    """CheckpointError for a model whose gated MLPs use another activation than SiLU."""
    if config.hidden_act not in ("silu", "swish"):
        raise CheckpointError(f"hidden_act {config.hidden_act!r} is not supported: it takes silu")


class SiluAndMul(nn.Module):
    """silu(x[:, :I]) * x[:, I:] for x [T, 2I]."""

    def __init__(self, ctx: ModelContext):
        super().__init__()
        check_activation(ctx.hf_config)
        self.ops = ctx.ops

    def forward(self, x: Tensor, reader: Linear | None = None) -> Activation:
        """reader: the layer that alone reads the result, which may want it quantised."""
        quant = reader and reader.input_quant(x.shape[0])
        return quant.silu_and_mul(x) if quant else self.ops.silu_and_mul(x)
