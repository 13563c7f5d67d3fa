"""From a decision to the kernel that runs, which for a measured split is one per range of M.

For one that a library compiles on this machine there may be another built ahead of time beside it,
which serves what is not compiled yet (`vllm.kernels.jit`).
"""

from typing import TYPE_CHECKING

from vllm.kernels import registry
from vllm.kernels.jit import ready
from vllm.kernels.select.decision import Decision
from vllm.kernels.select.problem import LinearProblem, MoEProblem

if TYPE_CHECKING:
    from vllm.kernels.interface import LinearKernel, LinearTensors, MoEKernel, MoETensors


def make_linear(decision: Decision, tensors: "LinearTensors") -> "LinearKernel":
    """Lays the weight out as the chosen backend wants it; ValueError for values it cannot take."""
    problem, winner = decision.problem, decision.winner
    assert isinstance(problem, LinearProblem)
    if not winner.parts:
        return _linear(decision, winner.backend, tensors)
    kernels = {name: _linear(decision, name, tensors) for name in {n for _, n in winner.parts}}
    from vllm.kernels.activations import KernelByTokens

    return KernelByTokens([(limit, kernels[name]) for limit, name in winner.parts])


def _linear(decision: Decision, name: str, tensors: "LinearTensors") -> "LinearKernel":
    """The kernel of backend `name`, which is the chosen one or a part of it."""
    problem = decision.problem
    own = next(c for c in decision.candidates if c.backend == name)
    kernel: LinearKernel = registry.maker(decision, name).linear(problem, tensors, own)
    other = ready.stand_in(decision, name)
    if other is None:
        return kernel
    from vllm.kernels.activations import KernelWhenReady

    until_then = registry.backend(other.backend).linear(problem, tensors, other)
    return KernelWhenReady(kernel, until_then, ready.is_ready(decision, name))


def make_moe(decision: Decision, tensors: "MoETensors") -> "MoEKernel":
    """The same for experts. Backends that take weights as they are stored share them."""
    problem, winner = decision.problem, decision.winner
    assert isinstance(problem, MoEProblem)
    by_name = {candidate.backend: candidate for candidate in decision.candidates}
    parts: list[tuple[int | None, MoEKernel]] = [
        (limit, registry.maker(decision, name).moe(problem, tensors, by_name[name]))
        for limit, name in winner.parts or ((None, winner.backend),)
    ]
    if len(parts) == 1:
        return parts[0][1]
    from vllm.kernels.activations import KernelByTokens

    return KernelByTokens(parts)
