"""From a decision to the kernel that runs, which for a measured split is one per range of M.

For one that a library compiles on this machine there may be another built ahead of time beside it,
which serves what is not compiled yet (`vllm.kernels.jit`).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.kernels import registry
from vllm.kernels.jit import ready
from vllm.kernels.select.decision import Candidate, Decision
from vllm.kernels.select.problem import LinearProblem, MoEProblem
from vllm.kernels.select.spec import UP_FIRST

if TYPE_CHECKING:
    from vllm.kernels.interface import LinearKernel, LinearTensors, MoEKernel, MoETensors


def make_linear(decision: Decision, tensors: "LinearTensors") -> "LinearKernel":
    """Lays the weight out as the chosen backend wants it; ValueError for values it cannot take."""
    problem = decision.problem
    assert isinstance(problem, LinearProblem)
    if _shares_requantised(decision) and not tensors.is_cut:
        from vllm.ops.scale_rounding import requantised
        from vllm.utils.torch_utils import dtype_of

        tensors = requantised(tensors, decision.winner.scales, dtype_of(problem.dtype))

    def make(own: Candidate) -> "LinearKernel":
        name = own.backend
        kernel: LinearKernel = registry.maker(decision, name).linear(problem, tensors, own)
        other = ready.stand_in(decision, name)
        if other is None:
            return kernel
        from vllm.kernels.activations import KernelWhenReady

        until_then = registry.backend(other.backend).linear(problem, tensors, other)
        return KernelWhenReady(kernel, until_then, ready.is_ready(decision, name))

    kernel: LinearKernel = _by_tokens(decision, make)
    if tensors.columns is None:
        return kernel
    from vllm.kernels.activations import ReorderedInput

    return ReorderedInput(kernel, tensors.columns)


def make_moe(decision: Decision, tensors: "MoETensors") -> "MoEKernel":
    """The same for experts."""
    problem = decision.problem
    assert isinstance(problem, MoEProblem)
    tensors = shared_experts(decision, tensors)
    kernel: MoEKernel = _by_tokens(
        decision, lambda own: registry.maker(decision, own.backend).moe(problem, tensors, own)
    )
    return kernel


def shared_experts(decision: Decision, tensors: "MoETensors") -> "MoETensors":
    """The experts as every chosen kernel takes them, so that the parts of a split hold one weight:
    re-quantised, where one of them needs that and not all scales allow it for nothing; in the
    layout that they share; with one input scale, where a kernel knows only one."""
    if _shares_requantised(decision) and not (tensors.row_offset or tensors.column_offset):
        from vllm.ops.scale_rounding import requantised
        from vllm.utils.torch_utils import dtype_of

        scales, dtype = decision.winner.scales, dtype_of(decision.problem.dtype)
        gate_up, down = (requantised(stack, scales, dtype) for stack in tensors.all_experts())
        tensors = replace(
            tensors,
            gate_up=gate_up.weight,
            gate_up_scales=gate_up.scales,
            down=down.weight,
            down_scales=down.scales,
        )
    if has_one_input_scale(decision):
        tensors = tensors.with_one_input_scale()
    # An emulation computes with the weight as it is stored.
    if not decision.is_emulated and registry.weight_layout(decision) == UP_FIRST:
        tensors = tensors.up_first()
    return tensors


def has_one_input_scale(decision: Decision) -> bool:
    """Whether a chosen kernel quantises tokens by one scale for all experts."""
    return any(spec.has_one_input_scale for spec in registry.winning_specs(decision))


def _shares_requantised(decision: Decision) -> bool:
    """Whether several kernels hold a weight that one of them has with scales of another form. A
    part alone would re-quantise a copy."""
    return len(decision.parts) > 1 and decision.winner.rescales


def _by_tokens(decision: Decision, make: Callable[[Candidate], Any]) -> Any:
    """The chosen kernel, or one that calls each part of a split for its numbers of tokens."""
    parts = decision.parts
    if len(parts) == 1:
        return make(decision.winner)
    from vllm.kernels.activations import KernelByTokens

    names = {name for _, name in parts}
    kernels = {c.backend: make(c) for c in decision.candidates if c.backend in names}
    return KernelByTokens([(limit, kernels[name]) for limit, name in parts])
