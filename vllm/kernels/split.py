"""From a decision to the kernel that runs, which for a measured split is one per range of M."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.kernels import registry
from vllm.kernels.problem import LinearProblem
from vllm.kernels.spec import Decision

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.kernels.tensors import LinearKernel, LinearTensors


def make_linear(decision: Decision, tensors: "LinearTensors") -> "LinearKernel":
    """Lays the weight out as the chosen backend wants it; ValueError for values it cannot take."""
    problem, winner = decision.problem, decision.winner
    assert isinstance(problem, LinearProblem)
    if not winner.parts:
        kernel: LinearKernel = registry.backend(winner.backend).linear(problem, tensors, winner)
        return kernel
    by_name = {candidate.backend: candidate for candidate in decision.candidates}
    kernels = {
        name: registry.backend(name).linear(problem, tensors, by_name[name])
        for name in {name for _, name in winner.parts}
    }
    return by_num_tokens([(limit, kernels[name]) for limit, name in winner.parts])


def by_num_tokens(parts: Sequence[tuple[int | None, "LinearKernel"]]) -> "LinearKernel":
    """Runs the first kernel whose limit holds x's M rows; the last has None for no limit.

    M is a number of the host, so a captured graph holds one of the kernels and no branch.
    """
    *limited, (_, last) = parts

    def apply(x: "Tensor") -> "Tensor":
        num_tokens = x.shape[0]
        for limit, kernel in limited:
            assert limit is not None
            if num_tokens <= limit:
                return kernel(x)
        return last(x)

    return apply
