"""Scales lie in memory where DeepGEMM reads them, and the backend feeds it exactly that.

Layouts are compared bit for bit with memory filled by index arithmetic from the documented rule.
"""

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import STAND_INS, Gpu, machine

from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels.backends import deep_gemm as backend
from vllm.kernels.interface import LinearTensors
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import LinearProblem
from vllm.kernels.select.select import select
from vllm.machine import Device, Lib, Libs
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    per_token_group_quant_fp8,
    per_token_group_quant_fp8_packed_for_deepgemm,
)
from vllm.utils.deep_gemm import (
    calc_diff,
    get_col_major_tma_aligned_tensor,
    get_tma_aligned_size,
    pack_ue8m0,
    transform_sf_into_required_layout,
)
from vllm.utils.fp8 import per_block_cast_to_fp8

H100, B200, GB10 = map(Device.parse, ("sm_90", "sm_100", "sm_121"))
RECIPE = (1, 128, 128)


# ---------------------------------------------------------------- memory, by index arithmetic


def memory(x: torch.Tensor) -> list:
    """Every element of the storage that x is a view of, in order of address."""
    return torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).tolist()


def float32_memory(scales: list, num_rows: int) -> list[float]:
    """scales[e][m][g] at e * G * stride + g * stride + m, where 4 divides stride >= M."""
    stride = (num_rows + 3) // 4 * 4
    num_groups = len(scales[0][0])
    cells = [0.0] * (len(scales) * num_groups * stride)
    for e, expert in enumerate(scales):
        for m, row in enumerate(expert):
            for g, value in enumerate(row):
                cells[(e * num_groups + g) * stride + m] = value
    return cells


def packed_memory(scales: list, num_rows: int, block_rows: int) -> list[int]:
    """The exponent of the scale of row m and group g: byte g % 4 of the int32 at
    e * W * stride + (g // 4) * stride + m."""
    stride = (num_rows + 3) // 4 * 4
    num_words = (len(scales[0][0]) + 3) // 4
    cells = [0] * (len(scales) * num_words * stride)
    for e, expert in enumerate(scales):
        for m in range(num_rows):
            for g, value in enumerate(expert[m // block_rows]):
                fraction, exponent = math.frexp(value)
                assert fraction == 0.5
                byte = exponent - 1 + 127
                cells[(e * num_words + g // 4) * stride + m] |= byte << 8 * (g % 4)
    return [cell - (1 << 32) if cell >= 1 << 31 else cell for cell in cells]


def nested(scales: torch.Tensor) -> list:
    """[expert][row][group]; a layer without experts has one."""
    return (scales if scales.ndim == 3 else scales.unsqueeze(0)).tolist()


@st.composite
def operands(draw, block_rows: int):
    """Power-of-two scales of an [mn, k] operand, alone or of several experts, with its sizes."""
    mn = draw(st.integers(1, 20 if block_rows == 1 else 400))
    k = draw(st.integers(1, 1200))
    num_groups = draw(st.one_of(st.none(), st.integers(1, 3)))
    shape = (num_groups or 1, -(-mn // block_rows), -(-k // 128))
    seed = draw(st.integers(0, 2**31))
    exponents = torch.randint(
        -127, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    scales = exponents.exp2().float()
    return (scales if num_groups else scales[0]), mn, k, num_groups


# ---------------------------------------------------------------- layouts


@given(operands(block_rows=1))
def test_hopper_reads_activation_scales_mn_major_with_rows_of_16_bytes(operand):
    sf, mn, k, num_groups = operand
    laid_out = transform_sf_into_required_layout(
        sf, mn, k, RECIPE, num_groups, is_sfa=True, arch=H100
    )
    assert torch.equal(laid_out, sf)
    assert memory(laid_out) == float32_memory(nested(sf), mn)


@given(operands(block_rows=128), st.booleans())
def test_hopper_reads_weight_scales_as_the_checkpoint_has_them(operand, disable_ue8m0_cast):
    sf, mn, k, num_groups = operand
    laid_out = transform_sf_into_required_layout(
        sf, mn, k, RECIPE, num_groups, disable_ue8m0_cast=disable_ue8m0_cast, arch=H100
    )
    assert laid_out is sf


@given(operands(block_rows=1), st.sampled_from([B200, GB10]))
def test_blackwell_reads_activation_scales_as_packed_exponents(operand, arch):
    sf, mn, k, num_groups = operand
    laid_out = transform_sf_into_required_layout(
        sf, mn, k, RECIPE, num_groups, is_sfa=True, arch=arch
    )
    assert laid_out.dtype == torch.int32 and laid_out.shape[-2:] == (mn, -(-k // 512))
    assert memory(laid_out) == packed_memory(nested(sf), mn, block_rows=1)


@settings(deadline=None)
@given(operands(block_rows=128), st.sampled_from([B200, GB10]))
def test_blackwell_reads_weight_scales_as_packed_exponents_of_every_row(operand, arch):
    sf, mn, k, num_groups = operand
    laid_out = transform_sf_into_required_layout(sf, mn, k, RECIPE, num_groups, arch=arch)
    assert laid_out.stride()[-2:] == (1, (mn + 3) // 4 * 4)
    assert memory(laid_out) == packed_memory(nested(sf), mn, block_rows=128)


def test_a_recipe_of_two_numbers_is_the_block_itself():
    sf = torch.full((2, 3), 2.0)
    by_two = transform_sf_into_required_layout(sf, 200, 384, (128, 128), arch=B200)
    by_three = transform_sf_into_required_layout(sf, 200, 384, RECIPE, is_sfa=False, arch=B200)
    assert torch.equal(by_two, by_three)


def test_without_the_cast_blackwell_gets_hoppers_layout():
    sf = torch.rand(5, 3)
    laid_out = transform_sf_into_required_layout(
        sf, 5, 384, RECIPE, is_sfa=True, disable_ue8m0_cast=True, arch=B200
    )
    assert laid_out.dtype == torch.float32 and torch.equal(laid_out, sf)


def test_the_current_chip_is_laid_out_for_where_none_is_given():
    sf = torch.ones(5, 3)
    for capability, dtype in ((90, torch.float32), (100, torch.int32)):
        with machine(Gpu(capability)):
            laid_out = transform_sf_into_required_layout(sf, 5, 384, RECIPE, is_sfa=True)
        assert laid_out.dtype == dtype


def test_the_input_is_never_written_to():
    sf = torch.full((2, 3), 4.0)
    transform_sf_into_required_layout(sf, 200, 384, RECIPE, arch=B200)
    assert torch.equal(sf, torch.full((2, 3), 4.0))


@pytest.mark.parametrize(
    "wrong",
    [0.0, -1.0, 3.0, 1.0000001, 2.0**-128, 3 * 2.0**-128, math.inf, math.nan],
)
def test_packing_refuses_what_an_exponent_byte_cannot_hold(wrong):
    sf = torch.tensor([[1.0, wrong]])
    with pytest.raises(ValueError, match="1 of 2 scales"):
        pack_ue8m0(sf)
    with pytest.raises(ValueError, match="requant_weight_ue8m0_inplace"):
        transform_sf_into_required_layout(sf, 128, 256, RECIPE, arch=B200)


def test_the_smallest_and_the_largest_exponents_are_held():
    packed = pack_ue8m0(torch.tensor([[2.0**-127, 2.0**-126, 1.0, 2.0**127]]))
    assert packed.item().to_bytes(4, "little", signed=True) == bytes([0, 1, 127, 254])


@pytest.mark.parametrize(
    ("shape", "dtype", "num_groups"),
    [
        ((3, 3), torch.float32, None),
        ((2, 2), torch.float32, None),
        ((1, 2, 3), torch.float32, None),
        ((2, 3), torch.float32, 1),
        ((2, 2, 3), torch.float32, 3),
        ((2, 3), torch.bfloat16, None),
    ],
)
def test_scales_that_do_not_belong_to_the_operand_are_refused(shape, dtype, num_groups):
    sf = torch.ones(shape, dtype=dtype)
    with pytest.raises(ValueError, match="scales of 200x384 by blocks of 128x128"):
        transform_sf_into_required_layout(sf, 200, 384, RECIPE, num_groups, arch=H100)


@pytest.mark.parametrize("arch", ["cpu", "sm_89", "sm_110"])
def test_chips_without_kernels_have_no_layout(arch):
    with pytest.raises(ValueError, match="no scale layout"):
        transform_sf_into_required_layout(
            torch.ones(1, 1), 128, 128, RECIPE, arch=Device.parse(arch)
        )


# ---------------------------------------------------------------- what fills and reads them


@given(st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_the_activation_quantiser_writes_the_layout_that_the_gemm_reads(rows, groups, use_ue8m0):
    x = torch.randn(rows, groups * 128, dtype=torch.bfloat16)
    q, plain = per_token_group_quant_fp8(x, 128, use_ue8m0=use_ue8m0)
    same_q, direct = per_token_group_quant_fp8(
        x, 128, column_major_scales=True, tma_aligned_scales=True, use_ue8m0=use_ue8m0
    )
    laid_out = transform_sf_into_required_layout(
        plain, rows, groups * 128, RECIPE, is_sfa=True, arch=H100
    )
    assert torch.equal(q.view(torch.uint8), same_q.view(torch.uint8))
    assert torch.equal(direct, laid_out) and direct.stride() == laid_out.stride()


@given(st.integers(1, 9), st.integers(1, 9))
def test_the_packing_quantiser_writes_the_layout_that_the_gemm_reads(rows, groups):
    x = torch.randn(rows, groups * 128, dtype=torch.bfloat16)
    q, plain = per_token_group_quant_fp8(x, 128, use_ue8m0=True)
    same_q, direct = per_token_group_quant_fp8_packed_for_deepgemm(x, 128)
    laid_out = transform_sf_into_required_layout(
        plain, rows, groups * 128, RECIPE, is_sfa=True, arch=B200
    )
    assert torch.equal(q.view(torch.uint8), same_q.view(torch.uint8))
    assert torch.equal(direct, laid_out) and direct.stride() == laid_out.stride()


@pytest.mark.parametrize(
    ("size", "element_size", "aligned"), [(1, 4, 4), (4, 4, 4), (5, 4, 8), (9, 2, 16), (17, 1, 32)]
)
def test_tma_strides_are_whole_units_of_16_bytes(size, element_size, aligned):
    assert get_tma_aligned_size(size, element_size) == aligned


def test_column_major_tensors_keep_their_values():
    x = torch.arange(2 * 3 * 5, dtype=torch.float32).view(2, 3, 5)
    laid_out = get_col_major_tma_aligned_tensor(x)
    assert torch.equal(laid_out, x) and laid_out.stride() == (20, 1, 4)


def test_calc_diff_is_zero_for_equal_tensors_and_free_of_scale():
    x, y = torch.randn(100), torch.randn(100)
    assert calc_diff(x, x) == pytest.approx(0, abs=1e-12)
    assert calc_diff(torch.zeros(3), torch.zeros(3)) == 0
    assert calc_diff(x, -x) == pytest.approx(2)
    assert calc_diff(1000 * x, 1000 * y) == pytest.approx(calc_diff(x, y), rel=1e-6)
    # x off by one part in 100 everywhere: half the square of that
    assert calc_diff(x, 1.01 * x) == pytest.approx(0.01**2 / 2, rel=0.02)


# ---------------------------------------------------------------- the backend


def linear_case(shard_rows, k, bias=False, scales_exponent=None):
    """A problem and its tensors; `scales_exponent` makes every scale that power of two."""
    shards = [per_block_cast_to_fp8(torch.randn(rows, k)) for rows in shard_rows]
    weight, scales = (torch.cat(parts) for parts in zip(*shards))
    if scales_exponent is not None:
        scales = torch.full_like(scales, 2.0**scales_exponent)
    weight_format = WeightFormat.parse("fp8-block")
    n = sum(shard_rows)
    problem = LinearProblem(
        n,
        k,
        weight_format,
        (ActScheme.DYNAMIC_GROUP128,),
        bias=bias,
        parts=shard_rows if len(shard_rows) > 1 else (),
    )
    made_bias = torch.randn(n) if bias else None
    return problem, LinearTensors(weight_format, weight, shard_rows, scales, made_bias)


def winner_of(problem, device, e8m0=None):
    libs = Libs.of([Lib("deep_gemm", "0.2.1", ("sm120",))])
    decision = select(problem, device, libs, Policy(e8m0=e8m0), (backend.LINEAR,))
    assert decision.chosen == "deep_gemm"
    return decision.winner


def widened(weight, scales_by_row):
    """q * scale in float64; scales [N, K / 128]."""
    return weight.double() * scales_by_row.double().repeat_interleave(128, 1)[:, : weight.shape[1]]


def expected(x, tensors, use_ue8m0, is_lossy):
    """The product of the numbers that the format defines, rounded to bfloat16 once."""
    q, scales = per_token_group_quant_fp8(x, 128, use_ue8m0=use_ue8m0)
    weight = widened(tensors.weight, tensors.row_scales())
    if is_lossy:
        shards = [
            per_block_cast_to_fp8(part.float(), use_ue8m0=True)
            for part in weight.split(tensors.shard_rows)
        ]
        weight = torch.cat(
            [widened(q, s.repeat_interleave(128, 0)[: q.shape[0]]) for q, s in shards]
        )
    y = (widened(q, scales) @ weight.T).bfloat16()
    return y if tensors.bias is None else (y.float() + tensors.bias).bfloat16()


CHIPS = pytest.mark.parametrize(
    ("capability", "e8m0", "use_ue8m0"),
    [(90, None, False), (90, True, True), (100, None, True), (121, None, True)],
)


@CHIPS
@pytest.mark.parametrize(
    ("shard_rows", "k", "bias"),
    [
        ((192,), 256, False),
        ((128, 64), 640, True),
        ((576, 192, 192), 128, True),  # 5 + 2 + 2 scale rows: padded to whole blocks
        ((576, 192, 192), 576, False),  # and the columns, with the inputs
    ],
)
def test_a_layer_computes_what_its_numbers_say(capability, e8m0, use_ue8m0, shard_rows, k, bias):
    problem, tensors = linear_case(shard_rows, k, bias)
    weight, scales = tensors.weight.clone(), tensors.scales.clone()
    winner = winner_of(problem, Device.parse(f"sm_{capability}"), e8m0)
    x = torch.randn(5, k, dtype=torch.bfloat16)
    # The stand-in carries no SM120 kernels, which matters to support alone, not to these sums.
    with machine(Gpu(capability), STAND_INS):
        y = backend.linear(problem, tensors, winner)(x)
    assert y.shape == (5, sum(shard_rows)) and y.dtype == torch.bfloat16
    assert torch.equal(y, expected(x, tensors, use_ue8m0, is_lossy=use_ue8m0))
    assert torch.equal(tensors.weight.view(torch.uint8), weight.view(torch.uint8))
    assert torch.equal(tensors.scales, scales)


@CHIPS
def test_scales_that_are_powers_of_two_lose_nothing(capability, e8m0, use_ue8m0):
    problem, tensors = linear_case((192,), 256, scales_exponent=-9)
    winner = winner_of(problem, Device.parse(f"sm_{capability}"), e8m0)
    weight, _ = backend.prepare(tensors, winner, Device.parse(f"sm_{capability}"))
    assert torch.equal(weight.view(torch.uint8), tensors.weight.view(torch.uint8))


def test_float32_scales_reach_hopper_as_they_are():
    problem, tensors = linear_case((192,), 256)
    winner = winner_of(problem, H100)
    with machine(Gpu(90), STAND_INS):
        kernel = backend.linear(problem, tensors, winner)
        kernel(torch.randn(3, 256, dtype=torch.bfloat16))
        calls = sys.modules["deep_gemm"].calls
    assert calls == [{"disable_ue8m0_cast": True}]
    weight, scales = backend.prepare(tensors, winner, H100)
    assert weight is tensors.weight and scales is tensors.scales


def test_no_tokens_need_no_library():
    problem, tensors = linear_case((192,), 256, bias=True)
    with machine(Gpu(90)):
        kernel = backend.linear(problem, tensors, winner_of(problem, H100))
        assert kernel(torch.empty(0, 256, dtype=torch.bfloat16)).shape == (0, 192)
