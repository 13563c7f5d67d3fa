"""Our FP8 GEMM for few tokens, limited by memory: of block scales, whose activations it quantises
itself, and of a scale for each row.

It serves at most 16 tokens, so it runs as the first part of a split (kernels/tune_table.py).
"""

from functools import partial
from typing import TYPE_CHECKING

from vllm.kernels import channel_scales
from vllm.kernels.problem import ActScheme, LinearProblem
from vllm.kernels.spec import NATIVE, Candidate, KernelSpec, Scales

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.tensors import LinearKernel, LinearTensors

MAX_TOKENS = 16

_Spec = partial(
    KernelSpec,
    backend="skinny",
    family="linear",
    devices=frozenset({"sm_90"}),
    dtypes=frozenset({"bf16", "fp16"}),
    libs=((NATIVE, ""),),
    native=("skinny_fp8_block_gemm",),
    native_archs=frozenset({"90", "90a"}),
    k_align=16,
    max_tokens=MAX_TOKENS,
)
SPECS = (
    _Spec(
        formats=frozenset({"fp8-block"}),
        act=frozenset({ActScheme.DYNAMIC_GROUP128}),
        blocks=frozenset({(128, 128)}),
        scales=(("*", Scales.FLOAT32),),
    ),
    _Spec(formats=channel_scales.FORMATS, act=channel_scales.ACTS),
)


def linear(problem: LinearProblem, tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """Takes the weight as it is stored. x [M, K] that comes as floats is quantised inside the
    kernel, or before it where each row of the weight has its scale."""
    from vllm import _native

    if problem.format in channel_scales.FORMATS:
        gemm = _native.load().skinny_fp8_channel_gemm
        return channel_scales.channel_kernel(tensors, winner, gemm)
    from vllm._custom_ops import ScaleLayout
    from vllm.kernels.activations import InputQuant, QuantizedInput, QuantizingKernel
    from vllm.model_executor.layers.quantization.utils.block_fit import fitted_kernel

    gemm = _native.load().skinny_fp8_block_gemm

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
