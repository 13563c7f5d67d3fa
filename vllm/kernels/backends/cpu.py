"""Our native CPU kernels: weights stay in their stored format and are widened in registers."""

from functools import partial
from typing import TYPE_CHECKING

from vllm.kernels.problem import AttentionProblem, KVQuantProblem, LinearProblem, Problem
from vllm.kernels.spec import NATIVE, Candidate, KernelSpec, Reason, Why

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.tensors import LinearKernel, LinearTensors
    from vllm.ops.paged_attention import CacheWriter, PagedAttention

_FLOATS = frozenset({"fp32", "bf16", "fp16"})
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
    _Spec(
        family="linear",
        formats=frozenset({"fp8-block", "fp8-tensor", "fp8-channel"}) | _FLOATS,
    ),
    _Spec(family="moe", formats=frozenset({"fp8-block"}) | _FLOATS),
    _Spec(family="attention", formats=_FLOATS | {"fp8"}, check=_head_size),
    _Spec(family="kv_quant", formats=_FLOATS | {"fp8"}, check=_head_size),
)


def linear(problem: LinearProblem, tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """Packs the weight into panels; the result computes x [M, K] -> [M, N]."""
    from vllm.ops import cpu_ops

    packed = cpu_ops.pack_linear(
        tensors.weight, tensors.row_scales(), tensors.block_k, tensors.bias
    )

    def apply(x: "Tensor") -> "Tensor":
        return cpu_ops.linear(x, packed)

    return apply


def attention(problem: AttentionProblem, write: "CacheWriter") -> "PagedAttention":
    from vllm.ops import cpu_ops
    from vllm.ops.paged_attention import PagedAttention

    return PagedAttention(cpu_ops.paged_attention, write, problem)


def kv_quant(problem: KVQuantProblem) -> "CacheWriter":
    from vllm.ops import cpu_ops

    return cpu_ops.reshape_and_cache
