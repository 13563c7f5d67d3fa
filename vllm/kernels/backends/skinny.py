"""Our GEMMs for few tokens, limited by memory: of FP8 with block scales, whose activations it
quantises itself, or a scale for each row; and, in Triton, of small weights in half precision.

They serve at most 16 tokens, so they run as the first part of a split (kernels/tune_table.py).
"""

from functools import partial
from typing import TYPE_CHECKING

from vllm.formats.act_scheme import ActScheme
from vllm.formats.scales import Scales
from vllm.kernels.backends import channel_scales
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import LinearProblem, Problem
from vllm.kernels.select.reason import Reason, Why
from vllm.kernels.select.spec import KernelSpec
from vllm.machine import NATIVE

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.interface import LinearKernel, LinearTensors

MAX_TOKENS = 16
# Numbers of a weight in half precision. Each token reads them from L2, 16 MiB for 16 tokens:
# estimated, at 4 TB/s that takes 4 us, as long as cuBLAS does.
MAX_SIZE = 1 << 19
# Columns, of which a program keeps two rows in registers.
MAX_COLUMNS = 1 << 13

_HALF = frozenset({"bf16", "fp16"})


def _is_small(problem: Problem) -> list[Reason]:
    assert isinstance(problem, LinearProblem)
    if problem.k <= MAX_COLUMNS and problem.n * problem.k <= MAX_SIZE:
        return []
    # Without the sizes of the problem: layers that are refused alike are shown together.
    return [Reason(Why.SHAPE, f"takes K up to {MAX_COLUMNS} and N * K up to {MAX_SIZE}")]


_Spec = partial(
    KernelSpec,
    backend="skinny",
    family="linear",
    dtypes=_HALF,
    k_align=16,
    max_tokens=MAX_TOKENS,
)
_Native = partial(
    _Spec,
    devices=frozenset({"sm_90"}),
    libs=((NATIVE, ""),),
    native=("skinny_fp8_block_gemm",),
    native_archs=frozenset({"90", "90a"}),
)
SPECS = (
    _Native(
        formats=frozenset({"fp8-block"}),
        act=frozenset({ActScheme.DYNAMIC_GROUP128}),
        blocks=frozenset({(128, 128)}),
        scales=(("*", Scales.FLOAT32),),
    ),
    _Native(formats=channel_scales.FORMATS, act=channel_scales.ACTS),
    _Spec(
        formats=_HALF,
        devices=frozenset({"sm_8x", "sm_9x", "sm_10x", "sm_11x", "sm_12x"}),
        libs=(("triton", "3.2"),),
        compiles="triton",
        takes_bias=False,
        check=_is_small,
    ),
)


def linear(problem: LinearProblem, tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """Takes the weight as it is stored. For one in FP8, x [M, K] that comes as floats is quantised
    inside the kernel, or before it where each row of the weight has its scale."""
    if problem.format in _HALF:
        return _half_kernel(problem, tensors)
    from vllm.platforms import native

    if problem.format in channel_scales.FORMATS:
        gemm = native.load().skinny_fp8_channel_gemm
        return channel_scales.channel_kernel(tensors, winner, gemm)
    from vllm.kernels.activations import InputQuant, QuantizedInput, QuantizingKernel
    from vllm.ops.block_fit import fitted_kernel
    from vllm.ops.fp8_quant import ScaleLayout

    gemm = native.load().skinny_fp8_block_gemm

    def make(tensors: "LinearTensors") -> "LinearKernel":
        weight, scales, bias = tensors.weight, tensors.scales, tensors.bias

        def multiply(x: QuantizedInput) -> "Tensor":
            out = x.q.new_empty(x.shape[0], weight.shape[0], dtype=x.dtype)
            gemm(x.q, x.scales, weight, scales, bias, out, 0, 0)
            return out

        def of_floats(x: "Tensor") -> "Tensor":
            out = x.new_empty(x.shape[0], weight.shape[0])
            gemm(x, None, weight, scales, bias, out, 0, 0)
            return out

        return QuantizingKernel(InputQuant(ScaleLayout.ROW_MAJOR), multiply, of_floats)

    return fitted_kernel(tensors, winner.fit, make)


def _half_kernel(problem: LinearProblem, tensors: "LinearTensors") -> "LinearKernel":
    from vllm.kernels.triton.skinny import product
    from vllm.utils.torch_utils import dtype_of

    weight = tensors.weight.to(dtype_of(problem.dtype))
    return lambda x: product(x, weight)
