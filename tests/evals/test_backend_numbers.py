"""Every FP8 backend's numbers, emulated, against the engine's own: 15,000 positions each.

The reference multiplies activations as they are by weights with float32 scales. Quantising
activations with float32 scales keeps a budget that DeepGEMM's power-of-two scales break.
"""

from functools import cache
from typing import NamedTuple

import pytest
from evals.arith import texts

from vllm.engine.arg_utils import EngineArgs
from vllm.evals.measure import Configuration, Job, Measured, measure
from vllm.evals.paired import Budget, compare
from vllm.kernels import question, registry
from vllm.kernels.problem import ActScheme, LinearProblem, MoEProblem, WeightFormat
from vllm.kernels.select import select
from vllm.kernels.spec import Candidate, Device, Origin, Override, Policy

# Half-way, as a ratio, between float32 scales and UE8M0: 0.00014 and 0.00031 nats where the dense
# layers compute so, 0.000032 and 0.000084 where the experts do (docs/accuracy.md).
BUDGETS = {"linear": Budget(max_kl=0.0002), "moe": Budget(max_kl=0.00005)}
NUM_TEXTS = 120
FP8 = WeightFormat.parse("fp8-block")
ACT = (ActScheme.DYNAMIC_GROUP128, ActScheme.NONE)
PROBLEMS = {
    "linear": LinearProblem(256, 256, FP8, ACT),
    "moe": MoEProblem(8, 2, 256, 128, FP8, ACT),
}
CHIPS = ("sm_90", "sm_100", "sm_120", "sm_89")


class Numbers(NamedTuple):
    """How weights and activations are rounded."""

    act: ActScheme | None
    is_lossy: bool


def candidate(family: str, backend: str, chip: str) -> Candidate | None:
    """The backend on that chip with every library; None where it cannot run there."""
    device = Device.parse(chip)
    forced = Override(family, backend, Origin(2, "flag"))
    specs = registry.specs(family)
    libs = question.libs_of("all", device)
    found = select(PROBLEMS[family], device, libs, Policy((forced,)), specs)
    return found.winner if found.chosen else None


def emulations() -> list[tuple[str, str, str]]:
    """(family, backend, chip) of every FP8 kernel for a GPU, on the first chip that it runs on."""
    found = []
    for family in PROBLEMS:
        for backend in registry.backend_names(family):
            chips = [chip for chip in CHIPS if candidate(family, backend, chip)]
            found += [(family, backend, chip) for chip in chips[:1]]
    return [*found, ("linear", "deep_gemm", "sm_100"), ("moe", "deep_gemm", "sm_100")]


@cache
def job() -> Job:
    return Job(texts.token_ids(NUM_TEXTS), num_logprobs=32)


def measured(**backends: str) -> Measured:
    args = EngineArgs(model=str(texts.MODEL), skip_tokenizer_init=True, **backends)
    return measure(Configuration(str(backends), args), job())


@cache
def reference() -> Measured:
    return measured()


@cache
def over_budget(family: str, numbers: Numbers) -> list[str]:
    """Once for all kernels that round alike."""
    backend, chip = next(
        (backend, chip)
        for other, backend, chip in emulations()
        if other == family and numbers_of(other, backend, chip) == numbers
    )
    name = f"emulate:{backend}@{chip}"
    result = compare(reference().positions, measured(**{f"{family}_backend": name}).positions)
    assert result.num_positions >= 10_000
    return result.over_budget(BUDGETS[family])


def numbers_of(family: str, backend: str, chip: str) -> Numbers:
    found = candidate(family, backend, chip)
    assert found is not None
    return Numbers(found.act, found.is_lossy)


@pytest.mark.parametrize(("family", "backend", "chip"), emulations())
def test_float32_scales_keep_the_budget_and_ue8m0_breaks_it(family, backend, chip):
    numbers = numbers_of(family, backend, chip)
    assert bool(over_budget(family, numbers)) == numbers.is_lossy


def test_every_way_of_rounding_is_among_them():
    found = {numbers_of(*emulation) for emulation in emulations()}
    assert found >= {Numbers(ACT[0], False), Numbers(ACT[0], True), Numbers(ACT[1], False)}
