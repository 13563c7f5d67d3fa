"""From a decision to the kernel that runs, which for a measured split is one per range of M."""

from typing import TYPE_CHECKING

from vllm.kernels import registry
from vllm.kernels.problem import LinearProblem, MoEProblem
from vllm.kernels.spec import Decision

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.tensors import LinearKernel, LinearTensors, MoEKernel, MoETensors


def make_linear(decision: Decision, tensors: "LinearTensors") -> "LinearKernel":
    """Lays the weight out as the chosen backend wants it; ValueError for values it cannot take."""
    problem, winner = decision.problem, decision.winner
    assert isinstance(problem, LinearProblem)
    if not winner.parts:
        kernel: LinearKernel = registry.maker(decision).linear(problem, tensors, winner)
        return kernel
    by_name = {candidate.backend: candidate for candidate in decision.candidates}
    kernels = {
        name: registry.maker(decision, name).linear(problem, tensors, by_name[name])
        for name in {name for _, name in winner.parts}
    }
    from vllm.kernels.activations import KernelByTokens

    return KernelByTokens([(limit, kernels[name]) for limit, name in winner.parts])


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

    def apply(x: "Tensor", weights: "Tensor", ids: "Tensor") -> "Tensor":
        num_tokens = x.shape[0]
        kernel = next(k for limit, k in parts if limit is None or num_tokens <= limit)
        return kernel(x, weights, ids)

    return apply
