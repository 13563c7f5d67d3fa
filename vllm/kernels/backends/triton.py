"""Our Triton kernels: FP8 block GEMM, fused MoE, attention, KV cache writes."""

from functools import partial
from math import gcd
from typing import TYPE_CHECKING

from vllm.formats.act_scheme import ActScheme
from vllm.formats.partial_blocks import Axis
from vllm.formats.scales import Scales
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import (
    AttentionProblem,
    KVQuantProblem,
    LinearProblem,
    MoEProblem,
    Problem,
)
from vllm.kernels.select.reason import Reason, Why
from vllm.kernels.select.spec import KernelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.activations import QuantizedInput
    from vllm.kernels.interface import LinearKernel, LinearTensors, MoEKernel, MoETensors
    from vllm.ops.paged_attention import CacheWriter, PagedAttention

_HALF, _FP8 = frozenset({"bf16", "fp16"}), frozenset({"fp8"})
_GROUP = 128  # columns of an activation that share one scale
# Triton compiles E4M3 (fp8e4nv) from 8.9 on alone, conversions too.
_FP8_CHIPS = frozenset({"sm_89", "sm_9x", "sm_10x", "sm_11x", "sm_12x"})
_Spec = partial(
    KernelSpec,
    backend="triton",
    libs=(("triton", "3.2"),),
    compiles="triton",
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
# Columns that are multiplied at a time, all under one scale: what an FP8 instruction takes.
_LEAST_STEP = 32
# Query heads that share a tile of keys: rows of the smallest tile (kernels/triton/attention.py).
_MOST_HEADS = 64


def _heads(problem: Problem) -> list[Reason]:
    assert isinstance(problem, AttentionProblem)
    reasons = []
    if problem.head_dim > 256:
        reasons.append(Reason(Why.SHAPE, f"head_dim = {problem.head_dim} is more than 256"))
    group = problem.num_heads // problem.num_kv_heads
    if group > _MOST_HEADS:
        text = f"{group} query heads to a KV head are more than {_MOST_HEADS}"
        reasons.append(Reason(Why.SHAPE, text))
    return reasons


def _columns_per_scale(problem: Problem) -> list[Reason]:
    assert isinstance(problem, LinearProblem | MoEProblem)
    columns = problem.weight.block[1]
    if isinstance(problem, LinearProblem):
        axis = Axis((problem.k,), problem.cut_k)
    else:
        axis = Axis((problem.intermediate,), problem.cut)
    step = gcd(axis.refined(columns), _GROUP) if columns else _GROUP
    if step < _LEAST_STEP:
        text = f"scale blocks leave steps of {step} columns, and it takes {_LEAST_STEP} or more"
        return [Reason(Why.SHAPE, text)]
    return []


SPECS = (
    _Block(family="linear", check=_columns_per_scale),
    _Block(family="moe", layouts=frozenset({"standard", "batched"}), check=_columns_per_scale),
    _Moe(
        formats=frozenset({"fp8-tensor", "fp8-channel"}),
        devices=_FP8_CHIPS,
        act=frozenset({ActScheme.DYNAMIC_TOKEN, ActScheme.DYNAMIC_TENSOR, ActScheme.STATIC_TENSOR}),
    ),
    _Moe(formats=_HALF),
    _Spec(family="attention", formats=_HALF, check=_heads),
    _Spec(family="attention", formats=_FP8, devices=_FP8_CHIPS, check=_heads),
    _Spec(family="kv_quant", formats=_HALF),
    _Spec(family="kv_quant", formats=_FP8, devices=_FP8_CHIPS),
)

# Formats that `moe` has code for.
MAKES = {"moe": _HALF | {"fp8-block"}}


def linear(problem: LinearProblem, tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """Takes the weight as it is stored; each call quantises x [M, K] and multiplies."""
    from vllm.kernels.activations import InputQuant, QuantizingKernel
    from vllm.kernels.triton.linear import fp8_block_gemm
    from vllm.ops.block_fit import fitted_kernel
    from vllm.ops.fp8_quant import ScaleLayout

    def make(tensors: "LinearTensors") -> "LinearKernel":
        weight, scales, block = tensors.weight, tensors.scales, tensors.format.block
        bias = tensors.bias
        assert scales is not None

        def multiply(x: "QuantizedInput") -> "Tensor":
            y = x.q.new_empty(x.shape[0], weight.shape[0], dtype=x.dtype)
            fp8_block_gemm(x.q, x.scales, weight, scales, bias, block, y)
            return y

        return QuantizingKernel(InputQuant(ScaleLayout.ROW_MAJOR), multiply)

    return fitted_kernel(tensors, winner.fit, make)


def moe(problem: MoEProblem, tensors: "MoETensors", winner: Candidate) -> "MoEKernel":
    """Takes the experts as they are stored. Nothing of a call waits for the device."""
    from vllm.kernels.triton.moe import Experts

    experts = Experts(problem, tensors)
    experts.warm_up()
    return experts


def attention(problem: AttentionProblem, write: "CacheWriter") -> "PagedAttention":
    from vllm.kernels.triton.attention import paged_attention
    from vllm.ops.paged_attention import PagedAttention

    return PagedAttention(paged_attention, write, problem)


def kv_quant(problem: KVQuantProblem) -> "CacheWriter":
    from vllm.kernels.triton.attention import reshape_and_cache

    return reshape_and_cache
