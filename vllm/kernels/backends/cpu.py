"""Our native CPU kernels: weights stay in their stored format and are widened in registers."""

from functools import partial
from typing import TYPE_CHECKING

from vllm.kernels.backends import shared
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import (
    AttentionProblem,
    DeltaRuleProblem,
    KVQuantProblem,
    LinearProblem,
    MoEProblem,
    Problem,
)
from vllm.kernels.select.reason import Reason
from vllm.kernels.select.spec import KernelSpec
from vllm.machine import NATIVE

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.interface import (
        DeltaRule,
        LinearKernel,
        LinearTensors,
        MoEKernel,
        MoETensors,
    )
    from vllm.ops.cpu_ops import LinearWeight
    from vllm.ops.paged_attention import CacheWriter, PagedAttention

_Spec = partial(
    KernelSpec,
    backend="cpu",
    devices=frozenset({"cpu"}),
    dtypes=shared.FLOATS,
    libs=((NATIVE, ""),),
    guarantees=frozenset({"batch-invariant"}),
)


def _head_size(problem: Problem) -> list[Reason]:
    assert isinstance(problem, AttentionProblem | KVQuantProblem)
    is_refused = problem.head_dim % 8 > 0 or problem.head_dim > 256
    text = f"head_dim = {problem.head_dim} is not a multiple of 8 up to 256"
    return shared.shape_reasons((is_refused, text))


_Cache = partial(_Spec, formats=shared.CACHES, check=_head_size)
SPECS = (
    _Spec(family="linear", formats=shared.WEIGHTS, native=("cpu_linear",)),
    _Spec(family="moe", formats=shared.WEIGHTS, native=("cpu_linear",), **shared.ANY_EXPERTS),
    _Cache(
        family="attention",
        native=("cpu_attention",),
        variants=shared.CHUNKED | shared.SINKS | shared.SOFTCAP,
    ),
    _Cache(family="kv_quant", native=("cpu_cache_write",)),
    _Spec(
        family="delta_rule",
        formats=shared.STATES,
        native=("cpu_delta_net",),
        check=shared.state_heads,
    ),
)


def linear(problem: LinearProblem, tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """Packs the weight into panels; the result computes x [M, K] -> [M, N]."""
    from vllm.ops import cpu_ops

    packed = pack_tensors(tensors)

    def apply(x: "Tensor") -> "Tensor":
        return cpu_ops.linear(x, packed)

    return apply


def pack_tensors(tensors: "LinearTensors") -> "LinearWeight":
    """The weight in panels, in its own bits: codes of 4 bits and int8 stay codes, and scales of
    E4M3 stay E4M3. int8 with zero points becomes bfloat16, which holds the differences."""
    import torch

    from vllm.ops import cpu_ops
    from vllm.ops.packed_weights import E2M1_ELEMENTS, pack_with

    if tensors.weight.dtype == torch.int8 and tensors.zero_points is None:
        scales = tensors.row_scales()
        return cpu_ops.pack_linear(tensors.weight, scales, tensors.block_k, tensors.bias)
    if not tensors.is_packed:
        return pack_with(cpu_ops.pack_linear, tensors)
    row_scales, row_factors = tensors.row_scales(), tensors.row_global_scales()
    if row_factors is not None:
        row_scales = tensors.scales
    assert row_scales is not None
    return cpu_ops.pack_linear_codes(
        tensors.weight,
        row_scales,
        tensors.block_k,
        tensors.bias,
        tensors.zero_points,
        row_factors,
        tensors.format.element in E2M1_ELEMENTS,
    )


def moe(problem: MoEProblem, tensors: "MoETensors", winner: Candidate) -> "MoEKernel":
    """Packs every expert as two linear layers; only experts that tokens ask for are computed."""
    from vllm.ops import cpu_ops

    experts = []
    for index in range(tensors.num_experts):
        try:
            gate_up, down = map(pack_tensors, tensors.expert(index))
        except ValueError as error:
            raise ValueError(f"expert {index}: {error}") from error
        experts.append((gate_up, down))
    activate = shared.expert_activation(problem, cpu_ops)
    return lambda x, weights, ids: cpu_ops.routed_experts(x, weights, ids, experts, activate)


def attention(problem: AttentionProblem, write: "CacheWriter") -> "PagedAttention":
    from vllm.ops import cpu_ops
    from vllm.ops.paged_attention import PagedAttention

    return PagedAttention(cpu_ops.paged_attention, write, problem)


def kv_quant(problem: KVQuantProblem) -> "CacheWriter":
    from vllm.ops import cpu_ops

    return cpu_ops.reshape_and_cache


def delta_rule(problem: DeltaRuleProblem) -> "DeltaRule":
    from vllm.ops import cpu_ops

    return cpu_ops.gated_delta_rule
