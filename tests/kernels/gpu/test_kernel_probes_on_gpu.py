"""Every kernel that can serve on this GPU passes the comparison that a start makes."""

import pytest
import torch
from gpu_tests import PARTS
from kernel_comparisons import WRONG, kernels, outcome_of

from vllm.kernels import registry
from vllm.kernels.jit.caches import use_caches
from vllm.kernels.select.spec import COMPILERS
from vllm.ops.paged_attention import CacheTarget
from vllm.platforms.probe import probe_device, probe_libs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
KERNELS = {name: one for name, one in kernels().items() if one.spec.devices != {"cpu"}}


def dealt(num_parts: int) -> list[str]:
    """Every part of the file gets its share of what takes long to compile, and begins with it."""
    order = (*COMPILERS, "")
    ordered = sorted(KERNELS, key=lambda name: order.index(KERNELS[name].spec.compiles))
    return [name for part in range(num_parts) for name in ordered[part::num_parts]]


@pytest.fixture(scope="module")
def machine():
    torch.empty(1, device="cuda")  # without a GPU nothing of a kernel can fail
    use_caches()
    return probe_device(), probe_libs()


@pytest.mark.parametrize("name", dealt(PARTS["test_kernel_probes_on_gpu.py"]))
def test_a_kernel_computes_what_the_reference_does(machine, name):
    outcome = outcome_of(KERNELS[name], *machine)
    if outcome.kind == "absent":
        pytest.skip(outcome.text)
    assert outcome.kind == "passed", outcome.text
    print(name, outcome.text)


@pytest.mark.parametrize(
    "name",
    [
        "linear/torch/bf16", "moe/triton/bf16", "attention/triton/bf16", "kv_quant/triton/fp8",
        "delta_rule/triton/fp32",
    ],
)  # fmt: skip
def test_a_kernel_that_is_wrong_by_3_percent_is_found(machine, monkeypatch, name):
    family, backend, _ = name.split("/")
    module = registry.backend(backend)
    monkeypatch.setattr(module, family, WRONG[family](getattr(module, family)))
    outcome = outcome_of(KERNELS[name], *machine)
    assert outcome.kind == "wrong" and "relative error" in outcome.text


def test_a_write_after_the_rotation_that_is_wrong_by_3_percent_is_found(machine, monkeypatch):
    from vllm.kernels import cuda_ops

    rotate = cuda_ops.rotary_into_cache

    def wrong(positions, q, k, target, *others):
        caches = target.k_cache, target.v_cache, target.slot_mapping
        scaled = CacheTarget(target.value * 1.03, *caches, target.k_scale, target.v_scale)
        rotate(positions, q, k, scaled, *others)

    monkeypatch.setattr(cuda_ops, "rotary_into_cache", wrong)
    outcome = outcome_of(KERNELS["kv_quant/rotary/bf16"], *machine)
    assert outcome.kind == "wrong" and "stored V" in outcome.text
