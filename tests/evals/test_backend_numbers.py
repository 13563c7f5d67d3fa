"""Every FP8 and FP4 backend's numbers, emulated, against the engine's own: 15,000 positions each.

The reference multiplies activations as they are by the stored weights, whose scales are float32.
Quantising activations with float32 scales keeps a budget that DeepGEMM's power-of-two scales break.
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from evals.arith import nvfp4, texts

from vllm.engine.arg_utils import EngineArgs
from vllm.evals.measure import Configuration, Job, measure
from vllm.evals.paired import Budget, Position, compare
from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.report import question
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.policy import Override, Policy
from vllm.kernels.select.problem import LinearProblem, MoEProblem
from vllm.kernels.select.reason import Origin
from vllm.kernels.select.select import select
from vllm.machine import Device

NUM_TEXTS = 120
CHIPS = ("sm_90", "sm_100", "sm_120", "sm_89")
FP8, NVFP4 = map(WeightFormat.parse, ("fp8-block", "nvfp4"))
GROUP128, GROUP16, FLOATS = ActScheme.DYNAMIC_GROUP128, ActScheme.NVFP4_GROUP16, ActScheme.NONE
PROBLEMS = {
    "fp8": LinearProblem(256, 256, FP8, (GROUP128, FLOATS)),
    "fp8 experts": MoEProblem(8, 2, 256, 128, FP8, (GROUP128, FLOATS)),
    "nvfp4": LinearProblem(256, 256, NVFP4, (GROUP16, FLOATS)),
}
# Half-way, as a ratio, between float32 scales and UE8M0: 0.00014 and 0.00031 nats where the dense
# layers compute so, 0.000032 and 0.000084 where the experts do (docs/accuracy.md).
BUDGETS = {"fp8": Budget(max_kl=0.0002), "fp8 experts": Budget(max_kl=0.00005)}
# Activations in 4 bits cost 0.0027; kept whole, as the reference keeps them, 0.000007.
NVFP4_BUDGETS = {GROUP16: Budget(max_kl=0.004), FLOATS: Budget(max_kl=0.00005)}


class Numbers(NamedTuple):
    """How weights and activations are rounded."""

    act: ActScheme | None
    is_lossy: bool


def candidate(kind: str, backend: str, chip: str) -> Candidate | None:
    """The backend on that chip with every library; None where it cannot run there."""
    problem, device = PROBLEMS[kind], Device.parse(chip)
    forced = Override(problem.family, backend, Origin(2, "flag"), pattern="layer")
    specs, libs = registry.specs(problem.family), question.libs_of("all", device)
    found = select(problem, device, libs, Policy((forced,)), specs, "layer")
    return found.winner if found.chosen else None


def emulations() -> list[tuple[str, str, str]]:
    """(kind, backend, chip) of every kernel for a GPU, on the first chip that it runs on."""
    found = []
    for kind, problem in PROBLEMS.items():
        for backend in registry.backend_names(problem.family):
            chips = [chip for chip in CHIPS if candidate(kind, backend, chip)]
            found += [(kind, backend, chip) for chip in chips[:1]]
    return [*found, ("fp8", "deep_gemm", "sm_100"), ("fp8 experts", "deep_gemm", "sm_100")]


def numbers_of(kind: str, backend: str, chip: str) -> Numbers:
    found = candidate(kind, backend, chip)
    assert found is not None
    return Numbers(found.act, found.is_lossy)


@pytest.fixture(scope="module")
def nvfp4_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("arith") / "nvfp4"
    nvfp4.write(folder, texts.token_ids(8, seed=3))
    return folder


@cache
def job() -> Job:
    return Job(texts.token_ids(NUM_TEXTS), num_logprobs=32)


@cache
def thoughts(model: Path, flag: str = "", value: str = "") -> list[Position]:
    chosen = {flag: value} if flag else {}
    args = EngineArgs(model=str(model), skip_tokenizer_init=True, **chosen)
    return measure(Configuration(value, args), job()).positions


@cache
def over_budget(kind: str, numbers: Numbers, model: Path, budget: Budget) -> list[str]:
    """Once for all kernels that round alike."""
    backend, chip = next(
        (backend, chip)
        for other, backend, chip in emulations()
        if other == kind and numbers_of(other, backend, chip) == numbers
    )
    flag = f"{PROBLEMS[kind].family}_backend"
    result = compare(thoughts(model), thoughts(model, flag, f"emulate:{backend}@{chip}"))
    assert result.num_positions >= 10_000
    return result.over_budget(budget)


def of_kind(*kinds: str) -> list[tuple[str, str, str]]:
    return [emulation for emulation in emulations() if emulation[0] in kinds]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "backend", "chip"), of_kind("fp8", "fp8 experts"))
def test_float32_scales_keep_the_budget_and_ue8m0_breaks_it(kind, backend, chip):
    numbers = numbers_of(kind, backend, chip)
    assert bool(over_budget(kind, numbers, texts.MODEL, BUDGETS[kind])) == numbers.is_lossy


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "backend", "chip"), of_kind("nvfp4"))
def test_nvfp4_keeps_the_budget_of_its_activations(nvfp4_model, kind, backend, chip):
    numbers = numbers_of(kind, backend, chip)
    assert over_budget(kind, numbers, nvfp4_model, NVFP4_BUDGETS[numbers.act]) == []


@pytest.mark.slow
def test_four_bit_activations_break_the_budget_of_whole_ones(nvfp4_model):
    numbers = Numbers(GROUP16, False)
    assert over_budget("nvfp4", numbers, nvfp4_model, NVFP4_BUDGETS[FLOATS])


def test_every_way_of_rounding_is_among_them():
    found = {(kind, *numbers_of(kind, backend, chip)) for kind, backend, chip in emulations()}
    fp8 = {(kind, *rounding) for kind in ("fp8", "fp8 experts")
           for rounding in ((GROUP128, False), (GROUP128, True), (FLOATS, False))}  # fmt: skip
    # Among the last, scales that are kept in the activations' type and those that are not.
    nvfp4_weights = {("nvfp4", FLOATS, False), ("nvfp4", FLOATS, True)}
    assert found == fp8 | {("nvfp4", GROUP16, False)} | nvfp4_weights
