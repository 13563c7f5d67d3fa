"""Our Triton kernels: FP8 block GEMM, fused MoE, attention, KV cache writes."""

from functools import partial
from typing import TYPE_CHECKING

from vllm.kernels.problem import ActScheme, AttentionProblem, KVQuantProblem, Problem
from vllm.kernels.spec import KernelSpec, Reason, Scales, Why

if TYPE_CHECKING:
    from vllm.ops.paged_attention import CacheWriter, PagedAttention

_HALF, _FP8 = frozenset({"bf16", "fp16"}), frozenset({"fp8"})
# Triton compiles E4M3 (fp8e4nv) from 8.9 on alone, conversions too.
_FP8_CHIPS = frozenset({"sm_89", "sm_9x", "sm_10x", "sm_11x", "sm_12x"})
_Spec = partial(
    KernelSpec,
    backend="triton",
    libs=(("triton", "3.2"),),
    dtypes=_HALF,
    devices=frozenset({"sm_8x"}) | _FP8_CHIPS,
)
_Block = partial(
    _Spec,
    formats=frozenset({"fp8-block"}),
    devices=_FP8_CHIPS,
    act=frozenset({ActScheme.DYNAMIC_GROUP128}),
    scales=(("*", Scales.FLOAT32),),
)
_Moe = partial(_Spec, family="moe", layouts=frozenset({"standard", "batched"}))


def _head_size(problem: Problem) -> list[Reason]:
    assert isinstance(problem, AttentionProblem)
    if problem.head_dim > 256:
        return [Reason(Why.SHAPE, f"head_dim = {problem.head_dim} is more than 256")]
    return []


SPECS = (
    _Block(family="linear"),
    _Block(family="moe", layouts=frozenset({"standard", "batched"})),
    _Moe(
        formats=frozenset({"fp8-tensor", "fp8-channel"}),
        devices=_FP8_CHIPS,
        act=frozenset({ActScheme.DYNAMIC_TOKEN, ActScheme.DYNAMIC_TENSOR, ActScheme.STATIC_TENSOR}),
    ),
    _Moe(formats=_HALF),
    _Spec(family="attention", formats=_HALF, check=_head_size),
    _Spec(family="attention", formats=_FP8, devices=_FP8_CHIPS, check=_head_size),
    _Spec(family="kv_quant", formats=_HALF),
    _Spec(family="kv_quant", formats=_FP8, devices=_FP8_CHIPS),
)


def attention(problem: AttentionProblem, write: "CacheWriter") -> "PagedAttention":
    from vllm.kernels.triton.attention import paged_attention
    from vllm.ops.paged_attention import PagedAttention

    return PagedAttention(paged_attention, write, problem)


def kv_quant(problem: KVQuantProblem) -> "CacheWriter":
    from vllm.kernels.triton.attention import reshape_and_cache

    return reshape_and_cache
