"""Our own CUTLASS kernels: FP8 and NVFP4 GEMM, dense and grouped."""

from functools import partial
from typing import TYPE_CHECKING

from vllm.kernels.problem import ActScheme, LinearProblem
from vllm.kernels.spec import NATIVE, Candidate, KernelSpec, Scales

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.tensors import LinearKernel, LinearTensors

_SM90, _SM100, _SM120 = {"90a"}, {"100a", "100f", "103a"}, {"120a", "120f", "121a"}
_Spec = partial(
    KernelSpec,
    backend="cutlass",
    dtypes=frozenset({"bf16", "fp16"}),
    libs=((NATIVE, ""),),
    devices=frozenset({"sm_90", "sm_10x", "sm_12x"}),
    native_archs=frozenset(_SM90 | _SM100 | _SM120),
    n_align=16,
    k_align=16,
)
_Block = partial(
    _Spec,
    native=("sm90_fp8_block_gemm", "sm100_fp8_block_gemm", "sm120_fp8_block_gemm"),
    formats=frozenset({"fp8-block"}),
    act=frozenset({ActScheme.DYNAMIC_GROUP128}),
    blocks=frozenset({(128, 128)}),
    scales=(("*", Scales.FLOAT32),),
)
_Nvfp4 = partial(
    _Spec,
    native=("sm100_nvfp4_gemm", "sm120_nvfp4_gemm"),
    formats=frozenset({"nvfp4"}),
    act=frozenset({ActScheme.NVFP4_GROUP16}),
    devices=frozenset({"sm_10x", "sm_12x"}),
    native_archs=frozenset(_SM100 | _SM120),
    n_align=32,
    k_align=32,
)

SPECS = (
    _Block(family="linear"),
    _Spec(
        family="linear",
        native=("cutlass_fp8_gemm",),
        formats=frozenset({"fp8-tensor", "fp8-channel"}),
        act=frozenset({ActScheme.DYNAMIC_TOKEN, ActScheme.DYNAMIC_TENSOR, ActScheme.STATIC_TENSOR}),
    ),
    _Nvfp4(family="linear"),
    _Block(family="moe"),
    _Nvfp4(family="moe"),
)


# Formats that `linear` has code for.
MAKES = {"linear": frozenset({"fp8-block"})}


def linear(problem: LinearProblem, tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """Takes an FP8 block weight as it is stored; each call quantises x [M, K] and multiplies."""
    from vllm import _native
    from vllm._custom_ops import ScaleLayout, per_token_group_fp8_quant
    from vllm.model_executor.layers.quantization.utils.block_fit import fitted_kernel

    gemm = _native.load().cutlass_fp8_block_gemm

    def make(tensors: "LinearTensors") -> "LinearKernel":
        weight, scales, bias = tensors.weight, tensors.scales, tensors.bias

        def apply(x: "Tensor") -> "Tensor":
            q, x_scales = per_token_group_fp8_quant(x, layout=ScaleLayout.TMA_ALIGNED)
            out = x.new_empty(x.shape[0], weight.shape[0])
            gemm(q, x_scales, weight, scales, bias, out)
            return out

        return apply

    return fitted_kernel(tensors, winner.fit, make)
