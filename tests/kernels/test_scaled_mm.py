"""FP8 layers with scales per tensor and channel, as `scaled_mm` computes them without a GPU, and
what it gives torch of MXFP8."""

import pytest
import torch
from fp8_linear_cases import SCHEMES, check_plain_scales
from torch.nn.functional import ScalingType, SwizzleType

from vllm.formats import mxfp8
from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.backends import scaled_mm
from vllm.kernels.numerics import LinearCase
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import LinearProblem
from vllm.kernels.select.select import select
from vllm.machine import Device, DeviceCapability, Lib, Libs
from vllm.ops.nvfp4 import unswizzle_scales
from vllm.utils.math_utils import round_up


@pytest.mark.parametrize("m", (0, 1, 33))
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("scale", ["tensor", "channel"])
@pytest.mark.parametrize("parts", [(256,), (320, 64, 64)])
def test_tensors_and_channels_are_computed_as_the_format_says(m, scheme, scale, parts):
    check_plain_scales(m, scheme, scale, parts, "cpu")


# ---------------------------------------------------------------- MXFP8


def reference_of_library(q, weight, x_tiles, x_recipe, tiles, recipe, x_order, order, output_dtype):
    """What torch documents of its GEMM for MXFP8, which no CPU has: scales in tiles of 128x4."""
    assert {x_recipe, recipe} == {ScalingType.BlockWise1x32}
    assert {x_order, order} == {SwizzleType.SWIZZLE_32_4_4}
    assert x_tiles.dtype == tiles.dtype == torch.float8_e8m0fnu and q.is_contiguous()
    (m, k), n = q.shape, weight.shape[1]
    wide = []
    for values, scales, num_rows in ((q, x_tiles, m), (weight.t(), tiles, n)):
        grid = [round_up(num_rows, 128), round_up(k // 32, 4)]
        own = unswizzle_scales(scales.view(torch.uint8).view(grid), num_rows, k // 32)
        powers = torch.exp2(own.float() - 127).repeat_interleave(32, 1)
        wide.append(values.float() * powers)
    return (wide[0] @ wide[1].t()).to(output_dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("m", [1, 33, 200])
@pytest.mark.parametrize("parts", [(), (320, 64, 64)])
def test_mxfp8_gives_torch_what_it_documents(monkeypatch, m, parts, bias):
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", reference_of_library)
    weight = WeightFormat.of(mxfp8.FORMAT.kind)
    problem = LinearProblem(448, 160, weight, mxfp8.FORMAT.act, bias=bias, parts=parts)
    b200 = Device("cuda", DeviceCapability.parse(100))
    libs = Libs.of([Lib("torch", "2.13.0")])
    winner = select(problem, b200, libs, Policy(), registry.specs("linear"), "up_proj").winner
    assert (winner.backend, winner.act) == ("scaled_mm", ActScheme.MXFP8_GROUP32)
    case = LinearCase.of(problem, winner, torch.device("cpu"), 200)
    kernel = scaled_mm.linear(problem, case.tensors, winner)
    assert case.error(kernel, m, case.expected(m)) < 4e-3
