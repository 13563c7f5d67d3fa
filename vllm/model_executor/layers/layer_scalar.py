"""A number that multiplies what a decoder layer gives."""

import torch
from torch import Tensor, nn

from vllm.model_executor.weights import FLOATS, Slot, empty_parameter, finite_into


class LayerScalar(nn.Module):
    """A layer gives residual + x, both of which are multiplied, in place. name: of the tensor [1]
    in checkpoints."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self.value = empty_parameter(1, dtype=torch.float32)

    def slots(self) -> dict[str, Slot]:
        return {self.name: Slot((1,), FLOATS, finite_into(self.value.data, "scalars of layers"))}

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        residual.mul_(self.value)
        return x.mul_(self.value)
