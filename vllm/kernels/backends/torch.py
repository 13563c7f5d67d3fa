"""The reference: plain torch on any device, correct before fast, always there."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.architectures.kv_cache import MLA
from vllm.kernels.backends.shared import (
    ANY_EXPERTS,
    CACHES,
    CHUNKED,
    FLOATS,
    SINKS,
    SOFTCAP,
    STATES,
    WEIGHTS,
    expert_activation,
)
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import (
    AttentionProblem,
    DeltaRuleProblem,
    KVQuantProblem,
    LinearProblem,
    Mamba2Problem,
    MoEProblem,
)
from vllm.kernels.select.spec import KernelSpec
from vllm.utils.dataclasses import dataclass
from vllm.utils.math_utils import round_up

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.interface import (
        DeltaRule,
        LinearKernel,
        LinearTensors,
        Mamba2Scan,
        MoEKernel,
        MoETensors,
    )
    from vllm.ops.paged_attention import CacheWriter, PagedAttention

_Spec = partial(
    KernelSpec,
    backend="torch",
    devices=frozenset({"cpu", "sm_7x", "sm_8x", "sm_9x", "sm_10x", "sm_11x", "sm_12x"}),
    dtypes=FLOATS,
)


@dataclass(frozen=True)
class DenseKernel:
    """x @ weight.T. weight [N, K]: for kernels that multiply with it and do more in one launch.
    padded: the same and rows of zeros, as many as `multiply` is fast with; None where it is."""

    weight: "Tensor"
    multiply: "Callable[[Tensor, Tensor], Tensor]"
    padded: "Tensor | None" = None

    @property
    def dense(self) -> "DenseKernel":
        return self

    def __call__(self, x: "Tensor") -> "Tensor":
        return self.multiply(x, self.weight)


# cuBLAS has no fast kernels for an odd number of columns, as a router has beside a gate. A larger
# weight, as an output projection that shares it, is not worth the copy.
_ALIGNED, _MOST_PADDED = 16, 2048


def with_zeros(weight: "Tensor") -> "Tensor | None":
    """weight [N, K] on a GPU as in DenseKernel."""
    num_rows = len(weight)
    if num_rows % _ALIGNED == 0 or num_rows > _MOST_PADDED:
        return None
    padded = weight.new_zeros(round_up(num_rows, _ALIGNED), weight.shape[1])
    padded[:num_rows] = weight
    return padded


SPECS = (
    _Spec(family="linear", formats=WEIGHTS),
    _Spec(family="moe", formats=WEIGHTS, **ANY_EXPERTS),
    _Spec(
        family="attention",
        formats=CACHES,
        waits=True,
        variants=CHUNKED | SINKS | SOFTCAP | {MLA},
    ),
    _Spec(family="kv_quant", formats=CACHES, waits=True, variants=frozenset({MLA})),
    _Spec(family="delta_rule", formats=STATES, waits=True),
    _Spec(family="mamba2", formats=STATES, waits=True),
)


def linear(problem: LinearProblem, tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """Keeps the weight as stored and widens it to float32 at every call.

    On a GPU a weight in the type of the activations goes to torch's own GEMM instead.
    """
    from torch.nn import functional

    from vllm.ops import torch_ops
    from vllm.ops.packed_weights import element_values
    from vllm.utils.torch_utils import dtype_of

    if tensors.weight.is_cuda and not problem.weight.is_quantized:
        weight = tensors.weight.to(dtype_of(problem.dtype))
        if tensors.bias is None:
            padded = with_zeros(weight)
            weight = weight if padded is None else padded[: len(weight)]
            return DenseKernel(weight, functional.linear, padded)
        added = tensors.bias.to(weight.dtype)
        return lambda x: functional.linear(x, weight, added)

    scales, bias = tensors.row_scales(), tensors.bias

    def apply(x: "Tensor") -> "Tensor":
        weight = element_values(tensors)
        return torch_ops.linear(x, torch_ops.pack_linear(weight, scales, tensors.block_k, bias))

    return apply


def moe(problem: MoEProblem, tensors: "MoETensors", winner: Candidate) -> "MoEKernel":
    """Keeps the experts as stored, values of 4 bits as E4M3, and widens them to float32 at every
    call."""
    from vllm.ops import torch_ops
    from vllm.ops.packed_weights import pack_with

    experts = [
        (pack_with(torch_ops.pack_linear, gate_up), pack_with(torch_ops.pack_linear, down))
        for gate_up, down in map(tensors.expert, range(tensors.num_experts))
    ]
    activate = expert_activation(problem, torch_ops)
    return lambda x, weights, ids: torch_ops.routed_experts(x, weights, ids, experts, activate)


def attention(problem: AttentionProblem, write: "CacheWriter") -> "PagedAttention":
    from vllm.ops import torch_ops
    from vllm.ops.paged_attention import PagedAttention

    if problem.variant == MLA:
        from vllm.ops.latent_attention import LatentPagedAttention, paged_latent_attention

        return LatentPagedAttention(paged_latent_attention, write, problem)

    def attend(
        q: "Tensor",
        k_cache: "Tensor",
        v_cache: "Tensor",
        *batch: Any,
        sinks: "Tensor | None" = None,
        softcap: float = 0.0,
        is_chunked: bool = False,
        **bounds: int,
    ) -> "Tensor":
        caches = _as_on_cpu(k_cache, v_cache)
        variant: dict[str, Any] = {"sinks": sinks, "softcap": softcap, "is_chunked": is_chunked}
        return torch_ops.paged_attention(q, *caches, *batch, **variant)

    return PagedAttention(attend, write, problem)


def kv_quant(problem: KVQuantProblem) -> "CacheWriter":
    from vllm.ops import torch_ops

    if problem.variant == MLA:
        from vllm.ops.latent_attention import write_latents

        return write_latents

    def write(
        k: "Tensor",
        v: "Tensor",
        k_cache: "Tensor",
        v_cache: "Tensor",
        slots: "Tensor",
        *scales: float,
    ) -> None:
        torch_ops.reshape_and_cache(k, v, *_as_on_cpu(k_cache, v_cache), slots, *scales)

    return write


def delta_rule(problem: DeltaRuleProblem) -> "DeltaRule":
    from vllm.ops import torch_ops

    return torch_ops.gated_delta_rule


def mamba2(problem: Mamba2Problem) -> "Mamba2Scan":
    from vllm.ops import torch_ops

    return partial(torch_ops.mamba2_scan, dt_limits=problem.dt_limits)


def _as_on_cpu(k_cache: "Tensor", v_cache: "Tensor") -> "tuple[Tensor, Tensor]":
    """Views with the axes of the CPU's caches (vllm/ops/paged_attention.py)."""
    if not k_cache.is_cuda:
        return k_cache, v_cache
    return k_cache.permute(0, 2, 3, 1), v_cache.permute(0, 2, 1, 3)
