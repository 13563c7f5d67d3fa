"""The reference: plain torch on any device, correct before fast, always there."""

from functools import partial
from typing import TYPE_CHECKING

from vllm.kernels.problem import AttentionProblem, KVQuantProblem, LinearProblem
from vllm.kernels.spec import Candidate, KernelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.tensors import LinearKernel, LinearTensors
    from vllm.ops.paged_attention import CacheWriter, PagedAttention

_FLOATS = frozenset({"fp32", "bf16", "fp16"})
_Spec = partial(
    KernelSpec,
    backend="torch",
    devices=frozenset({"cpu", "sm_7x", "sm_8x", "sm_9x", "sm_10x", "sm_11x", "sm_12x"}),
    dtypes=_FLOATS,
)

SPECS = (
    _Spec(
        family="linear",
        formats=frozenset({"fp8-block", "fp8-tensor", "fp8-channel"}) | _FLOATS,
    ),
    _Spec(family="attention", formats=_FLOATS | {"fp8"}),
    _Spec(family="kv_quant", formats=_FLOATS | {"fp8"}),
)


def linear(problem: LinearProblem, tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """Keeps the weight as stored and widens it to float32 at every call."""
    from vllm.ops import torch_ops

    packed = torch_ops.pack_linear(
        tensors.weight, tensors.row_scales(), tensors.block_k, tensors.bias
    )

    def apply(x: "Tensor") -> "Tensor":
        return torch_ops.linear(x, packed)

    return apply


def attention(problem: AttentionProblem, write: "CacheWriter") -> "PagedAttention":
    from vllm.ops import torch_ops
    from vllm.ops.paged_attention import PagedAttention

    return PagedAttention(torch_ops.paged_attention, write, problem)


def kv_quant(problem: KVQuantProblem) -> "CacheWriter":
    from vllm.ops import torch_ops

    return torch_ops.reshape_and_cache
