"""Our native CPU kernels: weights stay in their stored format and are widened in registers."""

from functools import partial
from typing import TYPE_CHECKING

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
from vllm.machine import NATIVE

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.interface import LinearKernel, LinearTensors, MoEKernel, MoETensors
    from vllm.ops.paged_attention import CacheWriter, PagedAttention

_FLOATS = frozenset({"fp32", "bf16", "fp16"})
_WEIGHTS = _FLOATS | {"fp8-block", "fp8-tensor", "fp8-channel", "nvfp4", "int4-group"}
_Spec = partial(
    KernelSpec,
    backend="cpu",
    devices=frozenset({"cpu"}),
    dtypes=_FLOATS,
    libs=((NATIVE, ""),),
    guarantees=frozenset({"batch-invariant"}),
)


def _head_size(problem: Problem) -> list[Reason]:
    assert isinstance(problem, AttentionProblem | KVQuantProblem)
    if problem.head_dim % 8 or problem.head_dim > 256:
        text = f"head_dim = {problem.head_dim} is not a multiple of 8 up to 256"
        return [Reason(Why.SHAPE, text)]
    return []


SPECS = (
    _Spec(family="linear", formats=_WEIGHTS, native=("cpu_linear",)),
    _Spec(family="moe", formats=_WEIGHTS, native=("cpu_linear",)),
    _Spec(family="attention", formats=_FLOATS | {"fp8"}, check=_head_size),
    _Spec(family="kv_quant", formats=_FLOATS | {"fp8"}, check=_head_size),
)


def linear(problem: LinearProblem, tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """Packs the weight into panels; the result computes x [M, K] -> [M, N].

    Values of 4 bits become E4M3, which holds them exactly; their scales stay apart, in float32.
    """
    from vllm.ops import cpu_ops
    from vllm.ops.packed_weights import pack_with

    packed = pack_with(cpu_ops.pack_linear, tensors)

    def apply(x: "Tensor") -> "Tensor":
        return cpu_ops.linear(x, packed)

    return apply


def moe(problem: MoEProblem, tensors: "MoETensors", winner: Candidate) -> "MoEKernel":
    """Packs every expert as two linear layers; only experts that tokens ask for are computed."""
    from vllm.ops import cpu_ops
    from vllm.ops.packed_weights import pack_with

    experts = []
    for index in range(tensors.num_experts):
        try:
            gate_up, down = (pack_with(cpu_ops.pack_linear, t) for t in tensors.expert(index))
        except ValueError as error:
            raise ValueError(f"expert {index}: {error}") from error
        experts.append((gate_up, down))
    return lambda x, weights, ids: cpu_ops.routed_experts(x, weights, ids, experts)


def attention(problem: AttentionProblem, write: "CacheWriter") -> "PagedAttention":
    from vllm.ops import cpu_ops
    from vllm.ops.paged_attention import PagedAttention

    return PagedAttention(cpu_ops.paged_attention, write, problem)


def kv_quant(problem: KVQuantProblem) -> "CacheWriter":
    from vllm.ops import cpu_ops

    return cpu_ops.reshape_and_cache
