"""Every backend that serves a format on this GPU passes the comparison that a start makes."""

from dataclasses import replace

import pytest
import torch

from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.numerics import LinearCase, MoECase, WrongResultError
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import LinearProblem, MoEProblem
from vllm.kernels.select.select import select
from vllm.kernels.selection import Selection
from vllm.platforms.probe import probe_device, probe_libs
from vllm.worker.kernel_probes import Probe, probes_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
# The activation schemes that checkpoints allow.
SCHEMES = {
    "bf16": [()],
    "fp8-block": [(ActScheme.DYNAMIC_GROUP128,)],
    "fp8-tensor": [(ActScheme.STATIC_TENSOR,), (ActScheme.DYNAMIC_TOKEN,)],
    "fp8-channel": [(ActScheme.DYNAMIC_TOKEN,), (ActScheme.DYNAMIC_TENSOR,)],
    "nvfp4": [(ActScheme.NVFP4_GROUP16,)],
    "int4-group[128]": [(), (ActScheme.DYNAMIC_TOKEN,)],
}
LINEAR_SIZES = [
    {"n": 4096, "k": 4096},
    {"n": 6144, "k": 4096, "parts": (4096, 1024, 1024)},
    {"n": 4096, "k": 18432 // 32, "cut_k": 32},
    {"n": 18432 // 32, "k": 7168, "cut_n": 32, "bias": True},
]
MOE_SIZES = [
    {"num_experts": 128, "top_k": 8, "hidden": 2048, "intermediate": 768},
    {"num_experts": 128, "top_k": 8, "hidden": 2048, "intermediate": 768, "cut_experts": 4},
    {"num_experts": 64, "top_k": 8, "hidden": 2048, "intermediate": 1408 // 2, "cut": 2},
]
PROBLEMS = [
    make(**size, weight=WeightFormat.parse(text), act=(*act, ActScheme.NONE))
    for make, sizes in ((LinearProblem, LINEAR_SIZES), (MoEProblem, MOE_SIZES))
    for text, acts in SCHEMES.items()
    for act in acts
    for size in sizes
]


def name_of(problem) -> str:
    return f"{problem} {','.join(problem.act)}"


def probes(problem) -> list[Probe]:
    """Of every kernel that could be chosen for the problem here."""
    device, libs = probe_device(), probe_libs()
    selection = Selection(device, libs, Policy())
    decision = select(problem, device, libs, Policy(), registry.specs(problem.family))
    own = [c for c in decision.candidates if not c.reasons and "emulation" not in c.backend]
    if isinstance(problem, LinearProblem):  # a split may have kernels for few tokens alone
        few = replace(problem, m_range=(1, 16))
        decided = select(few, device, libs, Policy(), registry.specs("linear"))
        known = {c.backend for c in own}
        own += [
            c
            for c in decided.candidates
            if not c.reasons and c.backend not in known and "emulation" not in c.backend
        ]
    found = []
    for candidate in own:
        limit = registry.spec_of(decision, candidate.backend).max_tokens
        parts = ((limit, candidate.backend), (None, own[0].backend)) if limit else ()
        winner = replace(candidate, backend="all", parts=parts) if parts else candidate
        chosen = replace(decision, chosen=winner.backend, candidates=(winner, *own))
        made = probes_of([("layer", chosen)], selection)
        found += [p for p in made if p.candidate.backend == candidate.backend]
    return found


@pytest.mark.parametrize("problem", PROBLEMS, ids=name_of)
def test_every_kernel_that_can_serve_a_format_passes(problem):
    wrong = {}
    with torch.inference_mode():
        for probe in probes(problem):
            try:
                probe.prepared()()
            except Exception as error:  # whatever a kernel raises: the others are tried too
                wrong[probe.candidate.backend] = f"{type(error).__name__}: {error}"
            print(probe.candidate.backend, wrong.get(probe.candidate.backend, "passed"))
    assert not wrong


@pytest.mark.parametrize("problem", PROBLEMS, ids=name_of)
def test_the_chosen_kernel_is_caught_when_it_is_wrong_by_3_percent(problem, monkeypatch):
    (first, *_) = probes(problem)
    case = LinearCase if isinstance(problem, LinearProblem) else MoECase
    error = case.error
    monkeypatch.setattr(
        case,
        "error",
        lambda self, kernel, *given: error(self, lambda *x: kernel(*x) * 1.03, *given),
    )
    with torch.inference_mode(), pytest.raises(WrongResultError, match="relative error"):
        first.prepared()()
