"""A split of experts holds one weight: TensorRT-LLM's kernels for few tokens and DeepGEMM for more,
both with up before gate. In Triton's interpreter, with stand-ins for both libraries; the split was
not run on hardware. On a GPU DeepGEMM alone, with gate and up in either order.
"""

from collections.abc import Iterator
from dataclasses import replace

import flashinfer_stand_in
import pytest
import torch
from machines import STAND_INS, Gpu, machine
from triton_device import DEVICE, IS_INTERPRETED, MARKS

from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import numerics, registry
from vllm.kernels.evidence.splits import Timings
from vllm.kernels.interface import MoETensors
from vllm.kernels.make_kernel import make_moe
from vllm.kernels.numerics import MoECase
from vllm.kernels.select.decision import Decision
from vllm.kernels.select.policy import Budget, Policy
from vllm.kernels.select.problem import MoEProblem
from vllm.kernels.select.reason import DEFAULT_ORDER
from vllm.kernels.select.select import select
from vllm.machine import Device, Lib, Libs
from vllm.ops.scale_rounding import requantised
from vllm.platforms.probe import probe_device, probe_libs

pytestmark = MARKS

FP8 = MoEProblem(
    4, 2, 256, 128, WeightFormat.parse("fp8-block"), (ActScheme.DYNAMIC_GROUP128,), "bf16"
)
B200 = Device.parse("sm_100")
LIBS = Libs.of(
    Lib(*lib)
    for lib in (
        ("flashinfer", "0.6.13"), ("flashinfer_cubin", "0.6.13"), ("deep_gemm", "0.1.3"),
        ("triton", "3.5"),
    )
)  # fmt: skip
FEW, MANY = 4, 300  # of the contiguous GEMM, whose experts have whole tiles
SPLIT = f"flashinfer-trtllm<={FEW}|deep_gemm"


def choice(problem: MoEProblem, policy: Policy | None = None) -> Decision:
    us = (("flashinfer-trtllm", (1.0, 5.0)), ("deep_gemm", (5.0, 1.0)))
    timings = Timings("table.json", (FEW, 8192), us)
    specs = registry.specs("moe", "sm_10x")
    return select(problem, B200, LIBS, policy or Policy(), specs, evidence=timings)


def with_powers_of_two(tensors: MoETensors) -> MoETensors:
    scales = tensors.gate_up_scales, tensors.down_scales
    gate_up, down = (own.log2().round().exp2() for own in scales if own is not None)
    return replace(tensors, gate_up_scales=gate_up, down_scales=down)


@pytest.fixture
def b200() -> Iterator[None]:
    if not IS_INTERPRETED:
        pytest.skip("stands in for libraries that a GPU may have")
    with machine(Gpu(100), STAND_INS) as patch:
        flashinfer_stand_in.install(patch)
        yield


@pytest.mark.parametrize("is_exact", [True, False], ids=["powers of two", "re-quantised"])
def test_a_split_computes_with_one_weight_what_each_kernel_says(is_exact: bool, b200: None) -> None:
    problem = replace(FP8, requant_error=0.0 if is_exact else None)
    decision = choice(problem)
    assert decision.chosen == SPLIT and decision.winner.is_lossy is not is_exact
    tensors = numerics.random_experts(problem, torch.device(DEVICE))
    tensors = with_powers_of_two(tensors) if is_exact else tensors
    given = tensors.gate_up.clone()
    kernel = make_moe(decision, tensors)
    assert torch.equal(tensors.gate_up.view(torch.uint8), given.view(torch.uint8))
    few, many = (part for _, part in kernel.parts)
    for ours, theirs in (("gate_up", "gemm1_weights"), ("down", "gemm2_weights")):
        assert getattr(many, ours)[0].data_ptr() == few._weights[theirs].data_ptr()
    # What is compared is the weight that both have.
    gate_up, down = (requantised(own, "ue8m0", torch.bfloat16) for own in tensors.all_experts())
    tensors = replace(
        tensors,
        gate_up=gate_up.weight,
        gate_up_scales=gate_up.scales,
        down=down.weight,
        down_scales=down.scales,
    )
    for backend, num_tokens in (("flashinfer-trtllm", FEW), ("deep_gemm", MANY)):
        (own,) = (c for c in decision.candidates if c.backend == backend)
        case = MoECase(
            problem, own, tensors, MoECase.of(problem, own, gate_up.weight.device, MANY).x
        )
        case.error(kernel, num_tokens, case.expected(num_tokens))  # raises for a large one


def test_where_a_second_rounding_is_not_allowed_no_part_is_rounded() -> None:
    budget = Budget(0.0, DEFAULT_ORDER, frozenset({"ue8m0"}))
    assert choice(FP8, Policy(budgets=(budget,))).chosen == "flashinfer-trtllm"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_nvfp4_experts_quantise_tokens_once(num_ranks: int, b200: None) -> None:
    """With several ranks, tokens choose as many experts as are here, some of others."""
    problem = replace(
        FP8,
        weight=WeightFormat.parse("nvfp4"),
        act=(ActScheme.NVFP4_GROUP16,),
        num_experts=4 * num_ranks,
        top_k=2 * num_ranks,
        cut_experts=num_ranks,
    )
    decision = choice(problem)
    assert decision.chosen == "flashinfer-trtllm"
    tensors = numerics.random_experts(problem, torch.device(DEVICE))
    assert tensors.gate_up_input_scales is not None and tensors.down_input_scales is not None
    spread = 1 + torch.rand(4, 2, device=DEVICE)
    tensors = replace(
        tensors,
        gate_up_input_scales=tensors.gate_up_input_scales * spread,
        down_input_scales=tensors.down_input_scales * spread[:, :1],
    )
    kernel = make_moe(decision, tensors)
    shared = tensors.with_one_input_scale()
    x = MoECase.of(problem, decision.winner, tensors.down.device, 8).x
    for num_tokens in (1, 8):
        case = MoECase(problem, decision.winner, shared, x)
        case.error(kernel, num_tokens, case.expected(num_tokens))


@pytest.mark.parametrize("num_tokens", [1, 31, MANY])
def test_deep_gemm_takes_gate_and_up_in_either_order(num_tokens: int) -> None:
    device, libs = Device.parse("sm_90"), LIBS
    if not IS_INTERPRETED:
        pytest.importorskip("deep_gemm")
        device, libs = probe_device(), probe_libs()
    specs = registry.specs("moe", device.family)
    (own,) = (
        c for c in select(FP8, device, libs, Policy(), specs).candidates if c.backend == "deep_gemm"
    )
    if own.reasons:
        pytest.skip("; ".join(map(str, own.reasons)))
    case = MoECase.of(FP8, own, torch.device(DEVICE), MANY)
    routing = case._routing(num_tokens)
    maker = registry.backend("deep_gemm")

    def results() -> list[torch.Tensor]:
        given = case.tensors, case.tensors.up_first()
        kernels = [maker.moe(FP8, tensors, own) for tensors in given]
        return [kernel(case.x[:num_tokens], *routing) for kernel in kernels]

    if IS_INTERPRETED:
        with machine(Gpu(90), STAND_INS):
            stored, up_first = results()
    else:
        stored, up_first = results()
    assert torch.equal(stored, up_first)
