"""NVFP4 layers of the CUTLASS backend, on the CPU, where its ops are computed by references."""

import pytest
import torch

from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.interface import LinearTensors
from vllm.kernels.report.question import parse_lib
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import LinearProblem
from vllm.kernels.select.reason import Why
from vllm.kernels.select.select import select
from vllm.machine import Device, Libs
from vllm.ops.nvfp4 import (
    nvfp4_dequantize,
    nvfp4_quantize,
)

FORMAT = WeightFormat.parse("nvfp4")


def make_layer(parts: tuple[int, ...], k: int, factors: list[float], has_bias: bool):
    """A merged layer, and its weight in float32. factors: what weights were divided by."""
    shards = [
        nvfp4_quantize(torch.randn(n, k), 1 / torch.tensor(factor))
        for n, factor in zip(parts, factors)
    ]
    wide = [
        nvfp4_dequantize(codes, scales, 1 / torch.tensor(factor))
        for (codes, scales), factor in zip(shards, factors)
    ]
    tensors = LinearTensors(
        FORMAT,
        torch.cat([codes for codes, _ in shards]),
        parts,
        torch.cat([scales for _, scales in shards]),
        torch.randn(sum(parts)) if has_bias else None,
        input_scale=torch.tensor(1 / 500),
        global_scales=torch.tensor(factors),
    )
    return tensors, torch.cat(wide)


def problem_of(parts: tuple[int, ...], k: int) -> LinearProblem:
    return LinearProblem(sum(parts), k, FORMAT, (ActScheme.NVFP4_GROUP16,), parts=parts)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
@pytest.mark.parametrize(
    ("parts", "factors"),
    [
        ((96,), [1 / 700]),
        ((64, 32, 32), [1 / 700] * 3),
        ((64, 32, 32), [1 / 700, 1 / 300, 1 / 300]),
    ],
)
def test_products_are_those_of_the_quantised_numbers(parts, factors, num_tokens, has_bias):
    torch.manual_seed(0)
    tensors, weight = make_layer(parts, 160, factors, has_bias)
    problem = problem_of(parts, 160)
    apply = registry.backend("cutlass").linear(
        problem, tensors, Candidate("cutlass", problem.act[0])
    )
    x = torch.randn(num_tokens, 160).bfloat16()
    codes, scales = nvfp4_quantize(x, torch.tensor(500.0))
    expected = nvfp4_dequantize(codes, scales, torch.tensor(500.0)).double() @ weight.double().T
    if tensors.bias is not None:
        expected += tensors.bias
    y = apply(x)
    assert y.dtype == x.dtype
    torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize(("parts", "fits"), [((64, 32, 32), True), ((72, 24, 32), False)])
def test_parts_must_be_whole_rows_of_tiles(parts, fits):
    device, libs = Device.parse("sm_100"), Libs.of([parse_lib("native=1+100f")])
    decision = select(problem_of(parts, 160), device, libs, Policy(), registry.specs("linear"))
    own = next(c for c in decision.candidates if c.backend == "cutlass")
    assert [reason.why for reason in own.reasons] == ([] if fits else [Why.SHAPE])
