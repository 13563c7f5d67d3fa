"""torch's FP8 GEMMs: `torch._scaled_mm` for scales per tensor and channel (cuBLASLt where one scale
serves each side, else a CUTLASS kernel), and `torch.nn.functional.scaled_mm` for MXFP8."""

from typing import TYPE_CHECKING

from vllm.formats import mxfp8
from vllm.formats.act_scheme import ActScheme
from vllm.kernels.backends import shared
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import LinearProblem
from vllm.kernels.select.spec import KernelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.interface import LinearKernel, LinearTensors

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
        devices=frozenset({"sm_10x"}),
        formats=frozenset({"mxfp8"}),
        act=frozenset({ActScheme.MXFP8_GROUP32}),
        dtypes=frozenset({"bf16"}),
        n_align=16,
        k_align=mxfp8.GROUP,
    ),
)


def linear(problem: LinearProblem, tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """Takes the weight as it is stored; each call quantises x [M, K] and multiplies."""
    of_format = _mxfp8 if problem.format == mxfp8.FORMAT.kind else _rows
    return of_format(tensors, winner)


def _mxfp8(tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """Both operands have UE8M0 scales of 32 columns, in tiles of 128 rows."""
    import torch
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

    from vllm.ops.fp8 import quantise_groups
    from vllm.ops.nvfp4 import swizzle_scales
    from vllm.utils.fp8 import ue8m0_encode

    def in_tiles(exponents: "Tensor") -> "Tensor":
        return swizzle_scales(exponents).view(torch.float8_e8m0fnu).flatten()

    recipe, tiled = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
    assert tensors.scales is not None
    weight, bias, scales = tensors.weight.t(), tensors.bias, in_tiles(tensors.scales)

    def apply(x: "Tensor") -> "Tensor":
        q, x_scales = quantise_groups(x, mxfp8.GROUP, use_ue8m0=True)
        x_tiles = in_tiles(ue8m0_encode(x_scales))
        given = q, weight, x_tiles, recipe, scales, recipe, tiled, tiled
        out: Tensor = scaled_mm(*given, output_dtype=x.dtype)
        return out if bias is None else out.add_(bias)

    return apply


def _rows(tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
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
