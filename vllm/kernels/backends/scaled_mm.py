"""torch's own GEMMs of 8-bit weights by activations in 8 bits, so that none of our own is needed.

FP8 with scales per tensor and channel: `torch._scaled_mm`, cuBLASLt where one scale serves each
side, else a CUTLASS kernel. int8 with a scale per row: `torch._int_mm`, summed exactly in int32 and
scaled in float32; cuBLASLt on a GPU (not run on hardware), oneDNN on a CPU, where the weight-only
kernels come first: they are faster for few tokens.
"""

from typing import TYPE_CHECKING

from vllm.formats.act_scheme import ActScheme
from vllm.kernels.backends import shared
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import LinearProblem, Problem
from vllm.kernels.select.reason import Reason
from vllm.kernels.select.spec import KernelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.interface import LinearKernel, LinearTensors

# Products of two int8 numbers that a sum in int32 has room for.
MAX_INT8_COLUMNS = (1 << 31) // (128 * 128) - 1
# Rows that `torch._int_mm` takes at least on a GPU.
LEAST_INT8_ROWS = 17


def _columns(problem: Problem) -> list[Reason]:
    assert isinstance(problem, LinearProblem)
    text = f"sums of more than {MAX_INT8_COLUMNS} products do not fit into int32"
    return shared.shape_reasons((problem.k > MAX_INT8_COLUMNS, text))


SPECS = (
    KernelSpec(
        backend="scaled_mm",
        family="linear",
        devices=frozenset({"sm_89", "sm_9x", "sm_10x", "sm_12x"}),
        # Scales per row give bfloat16 only.
        dtypes=frozenset({"bf16"}),
        n_align=16,
        k_align=16,
        **shared.FP8_ROWS,
    ),
    KernelSpec(
        backend="scaled_mm",
        family="linear",
        # Upstream documents int8 as not supported from 10.0 on.
        devices=frozenset({"sm_8x", "sm_9x", "cpu"}),
        formats=frozenset({"int8-channel"}),
        dtypes=shared.FLOATS,
        act=frozenset({ActScheme.DYNAMIC_TOKEN_INT8, ActScheme.STATIC_TENSOR_INT8}),
        n_align=8,
        k_align=8,
        check=_columns,
    ),
)


def linear(problem: LinearProblem, tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """Takes the weight as it is stored; each call quantises x [M, K] and multiplies."""
    if tensors.format.element == "int8":
        return _int8(tensors, winner)
    return _fp8(tensors, winner)


def _fp8(tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """One scale for all of the weight and one for all of x stay scalars; else both are spread, over
    the rows of the weight and the tokens. Sums are kept in float32, not in the fewer bits that the
    tensor cores of the H100 have (`use_fast_accum` is off).
    """
    from vllm._custom_ops import cutlass_scaled_mm

    weight, bias = tensors.weight, tensors.bias
    quantise = shared.input_quantiser(tensors, winner)
    scales = tensors.row_scales()
    assert scales is not None
    scales = scales.reshape(1, -1)
    if bool((scales == scales[0, 0]).all()):
        scales = scales[:, :1]

    def apply(x: "Tensor") -> "Tensor":
        q, x_scale = quantise(x)
        return cutlass_scaled_mm(q, weight.t(), x_scale, scales, x.dtype, bias)

    return apply


def _int8(tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    from vllm.ops import int8

    weight, bias, row_scales = tensors.weight, tensors.bias, tensors.row_scales()
    assert row_scales is not None
    column_scales = row_scales.reshape(1, -1)
    scale = tensors.input_scale if winner.act is ActScheme.STATIC_TENSOR_INT8 else None
    least_rows = LEAST_INT8_ROWS if weight.is_cuda else 1

    def apply(x: "Tensor") -> "Tensor":
        q, x_scales = int8.quantise(x, scale)
        out = int8.product(q, weight, least_rows) * x_scales * column_scales
        return (out if bias is None else out + bias).to(x.dtype)

    return apply
