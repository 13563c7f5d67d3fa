"""From a decision to kernels: one for each range of a split, another until one is compiled."""

from types import SimpleNamespace

import pytest
import torch
from selection_cases import ask, linear, moe, timed

from vllm.kernels import make_kernel, registry
from vllm.kernels.jit import ready


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
        kernel = make(decision, None)
        found = [kernel(torch.zeros(m, 8)) for m in (1, 64, 65)]
        assert found == ["triton", "triton", "cutlass"]


def test_another_kernel_stands_in_until_one_is_compiled(told):
    decision = ask(linear(), "90", timings=timed(deep_gemm=(1, 8192), cutlass=(1, 0)))
    kernel = make_kernel.make_linear(decision, None)
    assert kernel(torch.zeros(16, 8)) == "deep_gemm"  # nothing was planned: the first call compiles
    ready.is_ready(decision, "deep_gemm").set((16, 32), (16,))
    assert [kernel(torch.zeros(m, 8)) for m in (16, 17)] == ["deep_gemm", "cutlass"]
