"""torch's 8-bit GEMMs without a GPU: what `scaled_mm` computes there, the layouts of scales that
the GEMM for blocks asks for, and what it gives torch of MXFP8."""

import pytest
import torch
from fp8_linear_cases import LIBS, POLICIES, SCHEMES, block_layer, check_plain_scales, inputs, make
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from vllm.formats import mxfp8
from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.activations import InputQuant, QuantizedInput
from vllm.kernels.backends import scaled_mm as backend
from vllm.kernels.numerics import LinearCase
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import LinearProblem
from vllm.kernels.select.reason import Why
from vllm.kernels.select.select import select
from vllm.machine import Device, DeviceCapability, Lib, Libs
from vllm.ops.fp8_quant import ScaleLayout
from vllm.ops.nvfp4 import unswizzle_scales
from vllm.utils.math_utils import round_up

BLOCKWISE = "scaled_mm-blockwise"


@pytest.mark.parametrize("m", (0, 1, 33))
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("scale", ["tensor", "channel"])
@pytest.mark.parametrize("parts", [(256,), (320, 64, 64)])
def test_tensors_and_channels_are_computed_as_the_format_says(m, scheme, scale, parts):
    check_plain_scales(m, scheme, scale, parts, "cpu")


# ---------------------------------------------------------------- blocks


def shape_of_product(m: int, n: int, k: int) -> torch.Size:
    """Of a layer on a GPU that is not there: torch checks shapes, strides and types of what it is
    given, and computes nothing."""
    quant = InputQuant(ScaleLayout.TMA_ALIGNED)
    scales = quant.quantise(inputs(m, k)).scales
    with FakeTensorMode():
        problem, tensors = block_layer((n,), k, has_bias=True, device="cuda")
        kernel = make(problem, tensors, BLOCKWISE)
        assert kernel.input_quant(m) == quant
        q = torch.empty(m, k, device="cuda", dtype=torch.float8_e4m3fn)
        same = torch.empty_strided(scales.shape, scales.stride(), device="cuda")
        return kernel(QuantizedInput(q, same, torch.bfloat16)).shape


@pytest.mark.parametrize("m", (0, 1, 2, 3, 4, 5, 16, 130))
@pytest.mark.parametrize(("n", "k"), [(1536, 7168), (128, 128), (2048, 2304), (256, 640)])
def test_torch_accepts_the_layouts_of_scales_of_blocks(m, n, k):
    assert shape_of_product(m, n, k) == (m, n)


def test_torch_refuses_other_layouts():
    """So the test above can fail."""
    with FakeTensorMode():
        q = torch.empty(4, 640, device="cuda", dtype=torch.float8_e4m3fn)
        weight = torch.empty(256, 640, device="cuda", dtype=torch.float8_e4m3fn).t()
        scales = torch.empty(5, 4, device="cuda").t(), torch.empty(2, 5, device="cuda").t()
        with pytest.raises(RuntimeError, match="scale b must have shape"):
            scaled_mm(q, weight, scales[0], ScalingType.BlockWise1x128, scales[1],
                      ScalingType.BlockWise128x128)  # fmt: skip


@pytest.mark.parametrize("m", (1, 2, 3, 4, 7))
@pytest.mark.parametrize("k", (128, 640))
def test_tokens_are_filled_up_to_fours_with_zeros(m, k):
    given = InputQuant(ScaleLayout.TMA_ALIGNED).quantise(inputs(m, k))
    q, scales = backend.padded_tokens(given.q, given.scales)
    rows = -(-m // 4) * 4
    assert q.shape == (rows, k) and q.is_contiguous()
    assert scales.shape == (rows, k // 128) and scales.stride() == (1, rows)
    assert torch.equal(q[:m].float(), given.q.float()) and not q[m:].float().any()
    assert torch.equal(scales[:m], given.scales) and not scales[m:].any()


@pytest.mark.parametrize(
    ("archs", "device", "n", "k", "why"),
    [
        (("scaled-blocks",), "sm_90", 1536, 7168, None),
        (("scaled-blocks",), "sm_90", 576, 7168, None),
        ((), "sm_90", 1536, 7168, Why.DEVICE),  # torch for CUDA 12.8
        (("scaled-blocks",), "sm_100", 1536, 7168, Why.DEVICE),
        (("scaled-blocks",), "sm_120", 1536, 7168, Why.DEVICE),
        (("scaled-blocks",), "sm_90", 1544, 7168, Why.SHAPE),
        (("scaled-blocks",), "sm_90", 1536, 7232, Why.SHAPE),
    ],
)
def test_it_serves_hopper_with_a_torch_that_has_its_kernels(archs, device, n, k, why):
    problem, _ = block_layer((n,), k)
    others = (lib for lib in LIBS.libs if lib.name != "torch")
    libs = Libs.of([*others, Lib("torch", "2.11.0", archs)])
    specs = registry.specs("linear")
    decision = select(problem, Device.parse(device), libs, POLICIES[BLOCKWISE], specs)
    (found,) = (c for c in decision.candidates if c.backend == BLOCKWISE)
    assert {reason.why for reason in found.reasons} == ({why} if why else set())
    assert decision.chosen == (None if why else BLOCKWISE)


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
    kernel = backend.linear(problem, case.tensors, winner)
    assert case.error(kernel, m, case.expected(m)) < 4e-3
