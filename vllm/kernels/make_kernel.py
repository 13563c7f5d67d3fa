"""From a decision to the kernel that runs, which for a measured split is one per range of M.

For one that a library compiles on this machine there may be another built ahead of time beside it,
which serves what is not compiled yet (`vllm.kernels.jit`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.kernels import registry
from vllm.kernels.jit import ready
from vllm.kernels.select.decision import Candidate, Decision
from vllm.kernels.select.problem import LinearProblem, MoEProblem

if TYPE_CHECKING:
    from vllm.kernels.interface import LinearKernel, LinearTensors, MoEKernel, MoETensors


def make_linear(decision: Decision, tensors: "LinearTensors") -> "LinearKernel":
    """Lays the weight out as the chosen backend wants it; ValueError for values it cannot take."""
    problem = decision.problem
    assert isinstance(problem, LinearProblem)

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
    """The same for experts. Backends that take weights as they are stored share them."""
    problem = decision.problem
    assert isinstance(problem, MoEProblem)
    kernel: MoEKernel = _by_tokens(
        decision, lambda own: registry.maker(decision, own.backend).moe(problem, tensors, own)
    )
    return kernel


def _by_tokens(decision: Decision, make: Callable[[Candidate], Any]) -> Any:
    """The chosen kernel, or one that calls each part of a split for its numbers of tokens."""
    parts = decision.winner.parts
    if not parts:
        return make(decision.winner)
    from vllm.kernels.activations import KernelByTokens

    names = {name for _, name in parts}
    kernels = {c.backend: make(c) for c in decision.candidates if c.backend in names}
    return KernelByTokens([(limit, kernels[name]) for limit, name in parts])
