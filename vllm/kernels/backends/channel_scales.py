"""FP8 weights with a scale for each row, by GEMMs of blocks: the scale of every block is one, and
columns of the product are multiplied by those of the rows at the end."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from vllm.formats.act_scheme import ActScheme
from vllm.kernels.select.decision import Candidate
from vllm.utils.math_utils import cdiv

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.interface import LinearKernel, LinearTensors

FORMATS = frozenset({"fp8-tensor", "fp8-channel"})
ACTS = frozenset({ActScheme.DYNAMIC_TOKEN, ActScheme.DYNAMIC_TENSOR, ActScheme.STATIC_TENSOR})
BLOCK = 128


def input_quantiser(
    tensors: "LinearTensors", winner: Candidate
) -> "Callable[[Tensor], tuple[Tensor, Tensor]]":
    """x [M, K] -> float8_e4m3fn [M, K] and its scales: one, or [M, 1]."""
    from vllm.ops.quant_fp8 import QuantFP8
    from vllm.utils.fp8 import GroupShape

    if winner.act is ActScheme.STATIC_TENSOR:
        return partial(QuantFP8(True, GroupShape.PER_TENSOR), scale=tensors.input_scale)
    is_per_token = winner.act is ActScheme.DYNAMIC_TOKEN
    return QuantFP8(False, GroupShape.PER_TOKEN if is_per_token else GroupShape.PER_TENSOR)


def channel_kernel(
    tensors: "LinearTensors", winner: Candidate, gemm: Callable[..., object]
) -> "LinearKernel":
    """Takes the weight as it is stored; each call quantises x [M, K] and multiplies.

    gemm: of x in E4M3, scales [M, ceil(K / 128)] of any strides, weight [N, K], scales
    [ceil(N / 128), ceil(K / 128)], column scales [N], bias, out [M, N].
    """
    import torch

    weight, bias, row_scales = tensors.weight, tensors.bias, tensors.row_scales()
    assert row_scales is not None
    column_scales = row_scales.reshape(-1).contiguous()
    quantise = input_quantiser(tensors, winner)
    num_rows, num_blocks = weight.shape[0], cdiv(weight.shape[1], BLOCK)
    ones = torch.ones(cdiv(num_rows, BLOCK), num_blocks, device=weight.device)

    def apply(x: "Tensor") -> "Tensor":
        q, scales = quantise(x)
        scales = scales.reshape(-1, 1).expand(len(x), num_blocks)
        out = x.new_empty(len(x), num_rows)
        gemm(q, scales, weight, ones, column_scales, bias, out)
        return out

    return apply
