"""From a decision to kernels: one for each range of a split, another until one is compiled."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from selection_cases import LIBS, ask, linear, moe, timed

from vllm.formats.act_scheme import ActScheme
from vllm.kernels import make_kernel, registry
from vllm.kernels.activations import InputQuant, KernelByTokens, input_quant
from vllm.kernels.backends import cutlass
from vllm.kernels.jit import ready
from vllm.kernels.numerics import random_tensors, reference
from vllm.ops.fp8_quant import ScaleLayout

CPU = torch.device("cpu")


@pytest.fixture
def told(monkeypatch):
    """Kernels that say which candidate they were made for."""

    def make(problem, tensors, candidate):
        return lambda x, *routing: candidate.backend

    for family in ("linear", "moe"):
        for device_family in ("", "sm_9x"):
            registry.specs(family, device_family)  # made once, of the real backends
    made, real = SimpleNamespace(linear=make, moe=make), registry.backend
    monkeypatch.setattr(registry, "maker", lambda decision, name: made)
    monkeypatch.setattr(
        registry, "backend", lambda name: real(name) if name == "deep_gemm" else made
    )
    monkeypatch.setattr(ready, "_ready", {})


def test_of_a_split_each_range_has_its_kernel(told):
    timings = timed(triton=(1, 64), cutlass=(65, 8192), deep_gemm=(1, 0))
    for problem, make in ((linear(), make_kernel.make_linear), (moe(), make_kernel.make_moe)):
        decision = ask(problem, "90", timings=timings)
        assert decision.chosen == "triton<=64|cutlass"
        is_linear = make is make_kernel.make_linear
        kernel = make(decision, random_tensors(problem, CPU) if is_linear else None)
        found = [kernel(torch.zeros(m, 8)) for m in (1, 64, 65)]
        assert found == ["triton", "triton", "cutlass"]


def test_another_kernel_stands_in_until_one_is_compiled(told):
    decision = ask(linear(), "90", timings=timed(deep_gemm=(1, 8192), cutlass=(1, 0)))
    kernel = make_kernel.make_linear(decision, random_tensors(linear(), CPU))
    assert kernel(torch.zeros(16, 8)) == "deep_gemm"  # nothing was planned: the first call compiles
    ready.is_ready(decision, "deep_gemm").set((16, 32), (16,))
    assert [kernel(torch.zeros(m, 8)) for m in (16, 17)] == ["deep_gemm", "cutlass"]


# ---------------------------------------------------------------- two activation schemes

W4A16_FEW = timed(skinny_w4a16=(1, 8), cutlass=(9, 8192))


def relative(found, expected) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def test_parts_of_a_split_treat_activations_each_in_their_own_way():
    """The numbers of sm_120: few tokens as they are, many in NVFP4."""
    problem = linear("nvfp4", n=256, k=512, dtype="fp32", m_range=(1, 8192))
    bf16 = replace(problem, dtype="bf16")
    decision = ask(bf16, "120", timings=W4A16_FEW)
    assert decision.chosen == "skinny-w4a16<=8|cutlass"
    decision = replace(decision, problem=problem, is_emulated=True)
    tensors = random_tensors(problem, torch.device("cpu"))
    kernel = make_kernel.make_linear(decision, tensors)
    acts = {c.backend: c for c in decision.candidates}
    exact, rounded = acts["skinny-w4a16"], acts["cutlass"]
    assert (exact.act, rounded.act) == (ActScheme.NONE, ActScheme.NVFP4_GROUP16)
    for m, own, other in ((1, exact, rounded), (8, exact, rounded), (9, rounded, exact)):
        x = torch.randn(m, 512)
        assert relative(kernel(x), reference(own, tensors, x)) < 1e-5
        assert relative(kernel(x), reference(other, tensors, x)) > 0.02


@pytest.mark.parametrize("part", [256, (128, 128)], ids=str)
def test_both_parts_of_an_nvfp4_split_share_the_stored_codes(part):
    """The split that sm_120 runs, with CUTLASS's reference on the CPU beside the stored layout."""
    parts = part if isinstance(part, tuple) else ()
    problem = linear("nvfp4", n=256, k=512, parts=parts)
    decision = ask(problem, "120", timings=W4A16_FEW)
    tensors = random_tensors(problem, torch.device("cpu"))
    stored = tensors.weight.clone(), tensors.scales.view(torch.uint8).clone()
    many = cutlass.linear(problem, tensors, decision.winner)
    candidates = {c.backend: c for c in decision.candidates}
    x = torch.randn(9, 512).bfloat16()
    assert relative(many(x), reference(candidates["cutlass"], tensors, x)) < 8e-3
    assert torch.equal(tensors.weight, stored[0])
    assert torch.equal(tensors.scales.view(torch.uint8), stored[1])


def test_what_is_before_a_split_is_asked_by_the_number_of_tokens():
    """A kernel that takes floats for few tokens, and one whose input is quantised for many."""
    problem = linear(n=256, k=512)
    decision = ask(problem, "90", LIBS["none"])
    tensors = random_tensors(problem, torch.device("cpu"))
    kernels = {c.backend: c for c in decision.candidates}
    by_floats = registry.backend("torch").linear(problem, tensors, kernels["torch"])
    by_groups = registry.backend("cutlass").linear(problem, tensors, kernels["cutlass"])
    split = KernelByTokens([(8, by_floats), (None, by_groups)])
    assert split.input_quant(8) is None and input_quant(split, 1) is None
    assert split.input_quant(9) == InputQuant(ScaleLayout.TMA_ALIGNED)
    x = torch.randn(9, 512).bfloat16()
    quantised = split.input_quant(9).quantise(x)
    assert torch.equal(split(quantised), split(x))
    assert relative(split(x), reference(kernels["cutlass"], tensors, x)) < 8e-3
    few = reference(kernels["torch"], tensors, x[:8])
    assert relative(split(x[:8]), few) < 8e-3
