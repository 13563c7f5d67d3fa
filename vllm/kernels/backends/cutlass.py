"""Our own CUTLASS kernels: FP8 and NVFP4 GEMM, dense and grouped."""

from functools import partial

from vllm.kernels.problem import ActScheme
from vllm.kernels.spec import NATIVE, KernelSpec, Scales

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
    native="cutlass_fp8_block_gemm",
    formats=frozenset({"fp8-block"}),
    act=frozenset({ActScheme.DYNAMIC_GROUP128}),
    blocks=frozenset({(128, 128)}),
    scales=(("*", Scales.FLOAT32),),
)
_Nvfp4 = partial(
    _Spec,
    native="cutlass_nvfp4_gemm",
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
        native="cutlass_fp8_gemm",
        formats=frozenset({"fp8-tensor", "fp8-channel"}),
        act=frozenset({ActScheme.DYNAMIC_TOKEN, ActScheme.DYNAMIC_TENSOR, ActScheme.STATIC_TENSOR}),
    ),
    _Nvfp4(family="linear"),
    _Block(family="moe"),
    _Nvfp4(family="moe"),
)
