"""FlashInfer: its DeepGEMM, CUTLASS and TensorRT-LLM paths for GEMM and MoE; paged attention."""

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from vllm.kernels.problem import ActScheme, AttentionProblem, LinearProblem, Problem
from vllm.kernels.spec import Candidate, KernelSpec, Reason, Scales, Why

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.tensors import LinearKernel, LinearTensors
    from vllm.ops.paged_attention import CacheWriter, PagedAttention

_SM90, _SM100, _SM12X = frozenset({"sm_90"}), frozenset({"sm_100", "sm_103"}), frozenset({"sm_12x"})
_Spec = partial(
    KernelSpec,
    libs=(("flashinfer", "0.6"),),
    compiles="flashinfer",
    dtypes=frozenset({"bf16", "fp16"}),
)
_Block = partial(
    _Spec,
    formats=frozenset({"fp8-block"}),
    act=frozenset({ActScheme.DYNAMIC_GROUP128}),
    blocks=frozenset({(128, 128)}),
    scales=(("*", Scales.FLOAT32),),
    dtypes=frozenset({"bf16"}),
    k_align=128,
)
_Nvfp4 = partial(
    _Spec, formats=frozenset({"nvfp4"}), act=frozenset({ActScheme.NVFP4_GROUP16}), k_align=32
)
_Tensor = partial(
    _Spec,
    formats=frozenset({"fp8-tensor"}),
    act=frozenset({ActScheme.STATIC_TENSOR, ActScheme.DYNAMIC_TENSOR}),
    k_align=16,
)
_DEEPGEMM, _CUTLASS, _TRTLLM = "flashinfer-deepgemm", "flashinfer-cutlass", "flashinfer-trtllm"


def _head_size(problem: Problem) -> list[Reason]:
    assert isinstance(problem, AttentionProblem)
    if problem.head_dim != 128:
        return [Reason(Why.SHAPE, f"head_dim = {problem.head_dim}: run for 128 alone")]
    return []


SPECS = (
    # fp8_blockscale_gemm_sm90: quantises bf16 activations itself, swaps A and B for few tokens
    _Block(backend=_DEEPGEMM, family="linear", devices=_SM90, n_align=64),
    # gemm_fp8_nt_groupwise
    _Block(backend=_CUTLASS, family="linear", devices=_SM100 | _SM12X, n_align=128),
    _Block(backend=_TRTLLM, family="linear", devices=_SM100, n_align=128),
    # mm_fp4
    _Nvfp4(backend=_CUTLASS, family="linear", devices=_SM100 | _SM12X, n_align=32),
    _Nvfp4(backend=_TRTLLM, family="linear", devices=_SM100, n_align=128),
    # trtllm_fp8_block_scale_moe, trtllm_fp4_block_scale_moe, trtllm_fp8_per_tensor_scale_moe
    _Block(backend=_TRTLLM, family="moe", devices=_SM100),
    _Nvfp4(backend=_TRTLLM, family="moe", devices=_SM100),
    _Tensor(backend=_TRTLLM, family="moe", devices=_SM100),
    # cutlass_fused_moe: block scales on Hopper only
    _Block(backend=_CUTLASS, family="moe", devices=_SM90),
    _Nvfp4(backend=_CUTLASS, family="moe", devices=_SM100 | _SM12X),
    _Tensor(backend=_CUTLASS, family="moe", devices=_SM90 | _SM100),
    # Batch{Prefill,Decode}WithPagedKVCacheWrapper: FlashAttention 3 for prompts, 2 for the rest
    _Spec(
        backend="flashinfer",
        family="attention",
        devices=_SM90,
        formats=frozenset({"bf16", "fp8"}),
        dtypes=frozenset({"bf16"}),
        check=_head_size,
    ),
)

# Formats that `linear` has code for: the kernel for Hopper alone.
MAKES = {"linear": frozenset(), f"{_DEEPGEMM}/linear": frozenset({"fp8-block"})}


def linear(problem: LinearProblem, tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """Takes the weight as it is stored; each call quantises x [M, K] inside. The first compiles."""
    from vllm.kernels.jit.flashinfer import watch_flashinfer
    from vllm.model_executor.layers.quantization.utils.block_fit import fitted_kernel

    watch_flashinfer()
    gemm = import_module("flashinfer.gemm").fp8_blockscale_gemm_sm90

    def make(tensors: "LinearTensors") -> "LinearKernel":
        weight, scales, bias = tensors.weight, tensors.scales, tensors.bias
        assert scales is not None

        def apply(x: "Tensor") -> "Tensor":
            out: Tensor = gemm(x, weight, None, scales, out_dtype=x.dtype)
            return out if bias is None else out.add_(bias)

        return apply

    return fitted_kernel(tensors, winner.fit, make)


def attention(problem: AttentionProblem, write: "CacheWriter") -> "PagedAttention":
    """Compiles for a minute where the library's cache is cold."""
    from vllm.kernels.jit.flashinfer import watch_flashinfer
    from vllm.ops.flashinfer_attention import FlashInferAttention

    watch_flashinfer()
    return FlashInferAttention(write, problem)
