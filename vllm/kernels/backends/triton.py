"""Our Triton kernels: FP8 block GEMM, fused MoE, attention, KV cache writes, delta rule, Mamba2."""

from functools import partial
from math import gcd
from typing import TYPE_CHECKING

from vllm.architectures.kv_cache import MLA
from vllm.formats.act_scheme import ActScheme
from vllm.kernels.backends import shared
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import (
    AttentionProblem,
    DeltaRuleProblem,
    KVQuantProblem,
    LinearProblem,
    Mamba2Problem,
    MoEProblem,
    Problem,
    WeightProblem,
)
from vllm.kernels.select.reason import Reason, Why
from vllm.kernels.select.spec import KernelSpec

if TYPE_CHECKING:
    from vllm.kernels.interface import (
        DeltaRule,
        LinearKernel,
        LinearTensors,
        Mamba2Scan,
        MoEKernel,
        MoETensors,
    )
    from vllm.ops.paged_attention import CacheWriter, PagedAttention

_FP8 = frozenset({"fp8"})
_GROUP = 128  # columns of an activation that share one scale
# Triton compiles E4M3 (fp8e4nv) from 8.9 on alone, conversions too.
_FP8_CHIPS = frozenset({"sm_89", "sm_9x", "sm_10x", "sm_11x", "sm_12x"})
_Spec = partial(
    KernelSpec,
    backend="triton",
    libs=(("triton", "3.2"),),
    compiles="triton",
    dtypes=shared.HALF,
    devices=frozenset({"sm_8x"}) | _FP8_CHIPS,
)
# Scale blocks of any size.
_Block = partial(_Spec, devices=_FP8_CHIPS, **shared.FP8_BLOCKS | {"blocks": frozenset()})
_LAYOUTS = frozenset({"standard", "batched"})
_Moe = partial(_Spec, family="moe", layouts=_LAYOUTS, **shared.ALL_EXPERTS)
# Columns that are multiplied at a time, all under one scale: what an FP8 instruction takes.
_LEAST_STEP = 32
# Query heads that share a tile of keys: rows of the smallest tile (kernels/triton/attention.py).
_MOST_HEADS = 64
_LATENTS = frozenset({MLA})


def _heads(problem: Problem) -> list[Reason]:
    assert isinstance(problem, AttentionProblem)
    if problem.variant == MLA:
        latent, rope = problem.value_dim, problem.head_dim - problem.value_dim
        return shared.shape_reasons(
            (latent > 512, f"latents of {latent} are larger than 512"),
            (rope > 128, f"rotated parts of {rope} are larger than 128"),
        )
    group = problem.num_heads // problem.num_kv_heads
    return shared.shape_reasons(
        (problem.head_dim > 256, f"head_dim = {problem.head_dim} is more than 256"),
        (group > _MOST_HEADS, f"{group} query heads to a KV head are more than {_MOST_HEADS}"),
    )


def columns_per_scale(problem: Problem) -> list[Reason]:
    assert isinstance(problem, WeightProblem)
    columns = problem.weight.block[1]
    if columns and isinstance(problem, MoEProblem):  # by a finer grid, where blocks are partial
        columns = shared.cut_columns(problem).refined(columns)
    step = gcd(columns, _GROUP) if columns else _GROUP
    if step >= _LEAST_STEP:
        return []
    text = f"scale blocks leave steps of {step} columns, and it takes {_LEAST_STEP} or more"
    return [Reason(Why.SHAPE, text)]


_VARIANTS = shared.CHUNKED | shared.SINKS | shared.SOFTCAP | _LATENTS
_Attention = partial(_Spec, family="attention", check=_heads, variants=_VARIANTS)
SPECS = (
    _Block(family="linear", pads=True, check=columns_per_scale),
    _Block(family="moe", layouts=_LAYOUTS, **shared.ALL_EXPERTS, check=columns_per_scale),
    # A scale for 128 columns of a token, finer than the one that the formats ask for.
    _Moe(
        devices=_FP8_CHIPS,
        **shared.FP8_ROWS | {"act": frozenset({ActScheme.DYNAMIC_GROUP128})},
    ),
    _Moe(formats=shared.HALF),
    _Attention(formats=shared.HALF),
    _Attention(formats=_FP8, devices=_FP8_CHIPS),
    _Spec(family="kv_quant", formats=shared.HALF, variants=_LATENTS),
    _Spec(family="kv_quant", formats=_FP8, devices=_FP8_CHIPS, variants=_LATENTS),
    # Its products have the digits of TF32: too few for activations in float32.
    _Spec(family="delta_rule", formats=shared.STATES, check=shared.state_heads),
    _Spec(family="mamba2", formats=shared.STATES, check=shared.state_heads),
)


def linear(problem: LinearProblem, tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """Takes the weight as it is stored; each call quantises x [M, K] and multiplies."""
    from vllm.kernels.triton.linear import fp8_block_gemm
    from vllm.ops.fp8_quant import ScaleLayout

    block = tensors.format.block
    return shared.block_kernel(
        tensors,
        winner,
        ScaleLayout.ROW_MAJOR,
        lambda q, q_scales, weight, scales, bias, out: fp8_block_gemm(
            q, q_scales, weight, scales, bias, block, out
        ),
    )


def moe(problem: MoEProblem, tensors: "MoETensors", winner: Candidate) -> "MoEKernel":
    """Takes the experts as they are stored. Nothing of a call waits for the device."""
    from vllm.kernels.triton.moe import Experts

    experts = Experts(problem, tensors)
    experts.warm_up()
    return experts


def attention(problem: AttentionProblem, write: "CacheWriter") -> "PagedAttention":
    from vllm.kernels.triton.attention import paged_attention
    from vllm.ops.paged_attention import PagedAttention

    if problem.variant == MLA:
        from vllm.kernels.triton.latent_attention import paged_latent_attention
        from vllm.ops.latent_attention import LatentPagedAttention

        return LatentPagedAttention(paged_latent_attention, write, problem)

    return PagedAttention(paged_attention, write, problem)


def kv_quant(problem: KVQuantProblem) -> "CacheWriter":
    from vllm.kernels.triton.attention import reshape_and_cache

    if problem.variant == MLA:
        from vllm.kernels.triton.latent_attention import write_latents

        return write_latents

    return reshape_and_cache


def delta_rule(problem: DeltaRuleProblem) -> "DeltaRule":
    from vllm.kernels.triton.delta_rule import gated_delta_rule

    return gated_delta_rule


def mamba2(problem: Mamba2Problem) -> "Mamba2Scan":
    from vllm.kernels.triton.mamba2 import mamba2_scan

    return partial(mamba2_scan, dt_limits=problem.dt_limits)
