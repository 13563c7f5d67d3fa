"""Our native CPU kernels: weights stay in their stored format and are widened in registers."""

from typing import TYPE_CHECKING

from vllm.kernels.spec import (
    AttentionProblem,
    Device,
    KernelSpec,
    Libs,
    LinearProblem,
    Problem,
    Reason,
    Why,
)

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.tensors import LinearKernel, LinearTensors
    from vllm.ops.paged_attention import PagedAttention

_DTYPES = frozenset({"fp32", "bf16", "fp16"})


def _attention_limits(problem: Problem, device: Device, libs: Libs) -> list[Reason]:
    assert isinstance(problem, AttentionProblem)
    if problem.head_dim % 8 or problem.head_dim > 256:
        text = f"head_dim = {problem.head_dim} is not a multiple of 8 up to 256"
        return [Reason(Why.SHAPE, text)]
    return []


SPECS = (
    KernelSpec(
        backend="cpu",
        family="linear",
        devices=frozenset({"cpu"}),
        formats=frozenset({"fp8-block", "fp8-tensor", "fp8-channel"}) | _DTYPES,
        dtypes=_DTYPES,
        libs=(("native", ""),),
        guarantees=frozenset({"batch-invariant"}),
    ),
    KernelSpec(
        backend="cpu",
        family="attention",
        devices=frozenset({"cpu"}),
        formats=_DTYPES | {"fp8"},
        dtypes=_DTYPES,
        libs=(("native", ""),),
        guarantees=frozenset({"batch-invariant"}),
        check=_attention_limits,
    ),
)


def linear(problem: LinearProblem, tensors: "LinearTensors") -> "LinearKernel":
    """Packs the weight into panels; the result computes x [M, K] -> [M, N]."""
    from vllm.ops import cpu_ops

    packed = cpu_ops.pack_linear(
        tensors.weight, tensors.row_scales(), tensors.block_k, tensors.bias
    )

    def apply(x: "Tensor") -> "Tensor":
        return cpu_ops.linear(x, packed)

    return apply


def attention(problem: AttentionProblem) -> "PagedAttention":
    from vllm.ops import cpu_ops
    from vllm.ops.paged_attention import PagedAttention

    return PagedAttention(cpu_ops, problem)
