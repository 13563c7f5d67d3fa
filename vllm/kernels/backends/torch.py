"""The reference: plain torch on any device, correct before fast, always there."""

from typing import TYPE_CHECKING

from vllm.kernels.spec import AttentionProblem, KernelSpec, LinearProblem

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.tensors import LinearKernel, LinearTensors
    from vllm.ops.paged_attention import PagedAttention

_ANYWHERE = frozenset({"cpu", *(f"sm_{family}" for family in (70, 80, 90, 100, 110, 120))})
_DTYPES = frozenset({"fp32", "bf16", "fp16"})

SPECS = (
    KernelSpec(
        backend="torch",
        family="linear",
        devices=_ANYWHERE,
        formats=frozenset({"fp8-block", "fp8-tensor", "fp8-channel"}) | _DTYPES,
        dtypes=_DTYPES,
    ),
    KernelSpec(
        backend="torch",
        family="attention",
        devices=_ANYWHERE,
        formats=_DTYPES | {"fp8"},
        dtypes=_DTYPES,
    ),
)


def linear(problem: LinearProblem, tensors: "LinearTensors") -> "LinearKernel":
    """Keeps the weight as stored and widens it to float32 at every call."""
    from vllm.ops import torch_ops

    packed = torch_ops.pack_linear(
        tensors.weight, tensors.row_scales(), tensors.block_k, tensors.bias
    )

    def apply(x: "Tensor") -> "Tensor":
        return torch_ops.linear(x, packed)

    return apply


def attention(problem: AttentionProblem) -> "PagedAttention":
    from vllm.ops import torch_ops
    from vllm.ops.paged_attention import PagedAttention

    return PagedAttention(torch_ops, problem)
