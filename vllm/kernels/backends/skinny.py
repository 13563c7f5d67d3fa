"""Our FP8 block GEMM for few tokens: quantisation and product in one kernel, limited by memory.

It serves at most 16 tokens, so it runs as the first part of a split (kernels/tune_table.py).
"""

from typing import TYPE_CHECKING

from vllm.kernels.problem import ActScheme, LinearProblem
from vllm.kernels.spec import NATIVE, Candidate, KernelSpec, Scales

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.tensors import LinearKernel, LinearTensors

MAX_TOKENS = 16

SPECS = (
    KernelSpec(
        backend="skinny",
        family="linear",
        devices=frozenset({"sm_90"}),
        formats=frozenset({"fp8-block"}),
        dtypes=frozenset({"bf16", "fp16"}),
        act=frozenset({ActScheme.DYNAMIC_GROUP128}),
        libs=((NATIVE, ""),),
        native=("skinny_fp8_block_gemm",),
        native_archs=frozenset({"90", "90a"}),
        blocks=frozenset({(128, 128)}),
        scales=(("*", Scales.FLOAT32),),
        k_align=16,
        max_tokens=MAX_TOKENS,
    ),
)


def linear(problem: LinearProblem, tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """Takes the weight as it is stored; x [M, K] is quantised inside the kernel."""
    from vllm import _native
    from vllm.model_executor.layers.quantization.utils.block_fit import fitted_kernel

    gemm = _native.load().skinny_fp8_block_gemm

    def make(tensors: "LinearTensors") -> "LinearKernel":
        weight, scales, bias = tensors.weight, tensors.scales, tensors.bias

        def apply(x: "Tensor") -> "Tensor":
            out = x.new_empty(x.shape[0], weight.shape[0])
            gemm(x, None, weight, scales, bias, out, 0, 0)
            return out

        return apply

    return fitted_kernel(tensors, winner.fit, make)
