"""torch's own GEMMs of 8-bit weights by activations in 8 bits, so that none of our own is needed.

`scaled_mm`: FP8 with scales per tensor and channel by `torch._scaled_mm`, cuBLASLt where one scale
serves each side, else a CUTLASS kernel. int8 with a scale per row by `torch._int_mm`, summed
exactly in int32 and scaled in float32; cuBLASLt on a GPU (run on Hopper), oneDNN on a CPU,
where the weight-only kernels come first: they are faster for few tokens.
MXFP8 by `torch.nn.functional.scaled_mm` on sm_10x (not run on hardware).
`scaled_mm-blockwise`: `torch.nn.functional.scaled_mm` for 128x128 blocks, cuBLASLt on Hopper.
"""

from typing import TYPE_CHECKING

from vllm.formats import mxfp8
from vllm.formats.act_scheme import ActScheme
from vllm.kernels.backends import shared
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import LinearProblem, Problem
from vllm.kernels.select.reason import Reason
from vllm.kernels.select.spec import KernelSpec
from vllm.utils.math_utils import round_up

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


_BLOCKWISE = "scaled_mm-blockwise"
# What cuBLASLt asks of tokens, for scales that begin at 16 bytes, and of blocks along K.
_ALIGN = 4

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
    KernelSpec(
        backend=_BLOCKWISE,
        family="linear",
        devices=frozenset({"sm_90"}),
        dtypes=frozenset({"bf16"}),
        libs=(("torch", "2.11"),),
        # With a torch that is built for CUDA 12.9 or newer (vllm/platforms/libraries.py).
        carries=(("sm_9x", "torch", "scaled-blocks"),),
        n_align=16,
        k_align=128,
        **shared.FP8_BLOCKS,
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
    if tensors.format.element == "int8":
        return _int8(tensors, winner)
    if problem.format == mxfp8.FORMAT.kind:
        return _mxfp8(tensors, winner)
    if winner.backend == _BLOCKWISE:
        return _blockwise(tensors, winner)
    return _fp8(tensors, winner)


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


def _blockwise(tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """x in groups of 128 columns by a weight in blocks of 128x128.

    Layouts (pytorch/pytorch pull request 166752, cuBLAS's "Scaling factors layouts"): scales of x
    [M, K / 128] of strides [1, M], M a multiple of 4; those of the weight [L, ceil(N / 128)] of
    strides [1, L], L being K / 128 rounded up to a multiple of 4.
    """
    from torch.nn.functional import ScalingType, pad, scaled_mm

    from vllm.kernels.activations import InputQuant, QuantizedInput, QuantizingKernel
    from vllm.ops.block_fit import fitted_kernel
    from vllm.ops.fp8_quant import ScaleLayout

    def make(tensors: "LinearTensors") -> "LinearKernel":
        weight, bias = tensors.weight.t(), tensors.bias
        assert tensors.scales is not None
        scales = pad(tensors.scales, (0, -tensors.scales.shape[1] % _ALIGN)).t()

        def multiply(x: QuantizedInput) -> "Tensor":
            if not x.shape[0]:
                return x.q.new_empty(0, weight.shape[1], dtype=x.dtype)
            q, x_scales = padded_tokens(x.q, x.scales)
            out = scaled_mm(
                q,
                weight,
                x_scales,
                ScalingType.BlockWise1x128,
                scales,
                ScalingType.BlockWise128x128,
                output_dtype=x.dtype,
            ).narrow(0, 0, x.shape[0])
            return out if bias is None else out.add_(bias)

        return QuantizingKernel(InputQuant(ScaleLayout.TMA_ALIGNED), multiply)

    return fitted_kernel(tensors, winner.fit, make)


def padded_tokens(q: "Tensor", scales: "Tensor") -> "tuple[Tensor, Tensor]":
    """Rows of zeros up to a multiple of 4 tokens, below q float8_e4m3fn [M, K]; scales
    [M, K / 128] are laid out TMA_ALIGNED, so theirs are there already."""
    import torch
    from torch.nn.functional import pad

    num_tokens, num_groups = scales.shape
    num_rows = round_up(num_tokens, _ALIGN)
    if num_rows > num_tokens:
        q = pad(q.view(torch.uint8), (0, 0, 0, num_rows - num_tokens)).view(q.dtype)
    return q, scales.as_strided((num_rows, num_groups), (1, num_rows))
