"""`emulate:BACKEND@CHIP`: what is chosen, and that the numbers are those of the chosen kernel."""

import dataclasses

import pytest
import torch

from vllm.config.emulate import emulate, not_emulated
from vllm.config.kernel import KernelConfig
from vllm.config.policy import make_policy
from vllm.errors import ConfigError
from vllm.formats.act_scheme import ActScheme
from vllm.formats.scales import Scales
from vllm.formats.weight_format import WeightFormat
from vllm.kernels.backends import emulation
from vllm.kernels.interface import LinearTensors, MoETensors
from vllm.kernels.report.json_report import parse_report
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import LinearProblem, MoEProblem
from vllm.kernels.selection import Selection
from vllm.machine import Device, Lib, Libs
from vllm.ops import nvfp4, torch_ops
from vllm.utils import fp8

FP8 = WeightFormat.parse("fp8-block")
ACT = (ActScheme.DYNAMIC_GROUP128, ActScheme.NONE)
LINEAR = LinearProblem(256, 256, FP8, ACT, dtype="fp32")
MOE = MoEProblem(4, 2, 256, 128, FP8, ACT, dtype="fp32")


def selection(env: dict[str, bool] | None = None, model: str = "qwen3_5_moe_text", **backends: str):
    device = Device("cpu")
    preferences = KernelConfig(**backends).preferences(None).for_device(model, device)
    policy = make_policy(not_emulated(preferences), env or {})
    here = Selection(device, Libs.of([Lib("torch")]), policy)
    emulate(here, preferences, env or {}, model)
    return here


@pytest.mark.parametrize(
    ("env", "model", "chosen", "rank"),
    [
        ({}, "qwen3_5_moe_text", "cutlass", 5),
        ({}, "qwen3_moe", "deep_gemm", 7),
        ({"VLLM_USE_DEEP_GEMM": True}, "qwen3_5_moe_text", "deep_gemm", 3),
        ({"VLLM_USE_DEEP_GEMM": False}, "qwen3_moe", "cutlass", 3),
    ],
)
def test_a_chip_s_own_choice_is_made_on_a_machine_without_it(env, model, chosen, rank):
    here = selection(env, model, linear_backend="emulate:sm_100")
    decision = here.choose("layer", LINEAR)
    assert (decision.chosen, decision.origin.rank) == (chosen, rank)
    assert str(decision.device) == "cuda:sm_100" and decision.is_emulated


def test_a_backend_that_is_asked_for_outranks_the_model_rule():
    here = selection(linear_backend="emulate:deep_gemm@sm_100")
    decision = here.choose("layer", LINEAR)
    assert (decision.chosen, decision.origin.rank) == ("deep_gemm", 2)
    assert decision.origin.text == "--linear-backend emulate:deep_gemm@sm_100"
    assert decision.winner.scales == Scales.UE8M0


@pytest.mark.parametrize(
    ("env", "scales"),
    [({}, Scales.FLOAT32), ({"VLLM_USE_DEEP_GEMM_E8M0": True}, Scales.FLOAT32_CEIL_UE8M0)],
)
def test_hopper_rounds_scales_up_only_where_it_is_told_to(env, scales):
    here = selection(env, linear_backend="emulate:deep_gemm@sm_90")
    assert here.choose("layer", LINEAR).winner.scales == scales


def test_only_the_family_that_is_asked_for_is_emulated():
    here = selection(linear_backend="emulate:sm_100")
    assert here.choose("experts", MOE).chosen == "torch"
    here.check_overrides()


def test_a_report_of_emulated_decisions_reads_back_as_it_was():
    here = selection(linear_backend="emulate:sm_100")
    here.choose("layer", LINEAR)
    report = parse_report(here.to_json())
    assert report.records == here.records


@pytest.mark.parametrize(
    ("backends", "message"),
    [
        ({"linear_backend": "emulate:deep_gem@sm_100"}, "did you mean deep_gemm"),
        ({"linear_backend": "emulate:deep_gemm@sm_101"}, "unknown chip"),
        ({"linear_backend": "emulate:cpu"}, "takes a GPU's architecture"),
        ({"linear_backend": "emulate:"}, "unknown chip"),
        ({"moe_backend": "emulate:skinny@sm_90"}, "unknown backend 'skinny'"),
        ({"attention_backend": "emulate:sm_100"}, "only --linear-backend and --moe-backend"),
    ],
)
def test_a_wrong_name_is_refused_with_what_is_right(backends, message):
    with pytest.raises(ConfigError, match=message):
        KernelConfig(**backends)


# ---------------------------------------------------------------- numbers


def layer(rows: int = 256, columns: int = 256) -> LinearTensors:
    torch.manual_seed(0)
    q, scales = fp8.per_block_cast_to_fp8(torch.randn(rows, columns))
    return LinearTensors(FP8, q, (rows,), scales, input_scale=torch.tensor(0.01))


def computed(tensors: LinearTensors, act: ActScheme, scales: str = "", x=None):
    problem = dataclasses.replace(LINEAR, dtype="bf16")
    return emulation.linear(problem, tensors, Candidate("any", act, scales=scales))(x)


def dequantised(tensors: LinearTensors):
    return fp8.dequantise_blocks(tensors.weight, tensors.scales)


def rounded_rows(x, amax):
    scales = fp8.fp8_scales(amax)
    return fp8.round_to_fp8(x, scales).float() * scales


ROUNDINGS = {
    ActScheme.NONE: lambda x: x,
    ActScheme.DYNAMIC_TOKEN: lambda x: rounded_rows(x, x.abs().amax(1, keepdim=True)),
    ActScheme.DYNAMIC_TENSOR: lambda x: rounded_rows(x, x.abs().max()),
    ActScheme.STATIC_TENSOR: lambda x: fp8.round_to_fp8(x, torch.tensor(0.01)).float() * 0.01,
    ActScheme.DYNAMIC_GROUP128: lambda x: torch.cat(
        [rounded_rows(half, half.abs().amax(1, keepdim=True)) for half in x.split(128, 1)], 1
    ),
}


@pytest.mark.parametrize("act", ROUNDINGS)
def test_activations_are_rounded_as_the_winner_rounds_them(act):
    tensors = layer()
    x = torch.randn(5, 256).bfloat16()
    expected = ROUNDINGS[act](x.float()) @ dequantised(tensors).T
    torch.testing.assert_close(computed(tensors, act, x=x), expected.bfloat16())
    assert torch.equal(computed(tensors, act, x=x.float()), computed(tensors, act, x=x).float())


def test_ue8m0_rounds_weights_and_activations_once_more():
    tensors = layer()
    x = torch.randn(64, 256).bfloat16()
    exact = x.float() @ dequantised(tensors).T
    errors = [
        float((computed(tensors, ACT[0], scales, x).float() - exact).norm() / exact.norm())
        for scales in (Scales.FLOAT32, Scales.UE8M0, Scales.FLOAT32_CEIL_UE8M0)
    ]
    assert errors[1] == errors[2]
    assert 1.3 < errors[1] / errors[0] < 1.7


def test_nvfp4_activations_have_an_e4m3_scale_for_16_columns():
    tensors = layer()
    x = torch.randn(4, 256).bfloat16()
    divisor = torch.tensor([100.0])
    seen = nvfp4.nvfp4_dequantize(*nvfp4.nvfp4_quantize(x, divisor), divisor)
    expected = (seen @ dequantised(tensors).T).bfloat16()
    torch.testing.assert_close(computed(tensors, ActScheme.NVFP4_GROUP16, x=x), expected)


@pytest.mark.parametrize("scales", [Scales.FLOAT32, Scales.UE8M0])
def test_experts_are_two_emulated_layers_each_for_their_own_tokens(scales):
    torch.manual_seed(1)
    pairs = [(layer_of(256, 256), layer_of(256, 128)) for _ in range(4)]
    tensors = MoETensors(
        FP8,
        *(torch.stack([pair[i].weight for pair in pairs]) for i in (0, 1)),
        *(torch.stack([pair[i].scales for pair in pairs]) for i in (0, 1)),
    )
    x, weights = torch.randn(6, 256), torch.rand(6, 2)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(6)])
    winner = Candidate("any", ACT[0], scales=scales)
    result = emulation.moe(dataclasses.replace(MOE, dtype="bf16"), tensors, winner)(x, weights, ids)
    expected = torch.zeros(6, 256)
    for token in range(6):
        for place in range(2):
            gate_up, down = tensors.expert(int(ids[token, place]))
            row = x[token : token + 1].bfloat16()
            inner = torch_ops.silu_and_mul(computed(gate_up, ACT[0], scales, row))
            out = computed(down, ACT[0], scales, inner)[0].float()
            expected[token] += weights[token, place] * out
    torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2 * float(expected.std()))


def layer_of(rows: int, columns: int) -> LinearTensors:
    q, scales = fp8.per_block_cast_to_fp8(torch.randn(rows, columns) * columns**-0.5)
    return LinearTensors(FP8, q, (rows,), scales)


def test_one_that_begins_afresh_emulates_too():
    here = selection(linear_backend="emulate:sm_100")
    assert here.afresh().choose("layer", LINEAR).is_emulated
