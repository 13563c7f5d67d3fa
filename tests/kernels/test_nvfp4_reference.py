"""NVFP4 in torch: the numbers that the kernels are held to."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.ops import nvfp4

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
MIDPOINTS = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}


def code_of(value):
    return int(nvfp4.e2m1_encode(torch.tensor([value]))[0])


def bits_as_float(*bits):
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32))


# ---------------------------------------------------------------- E2M1


def test_every_code_decodes_to_a_value_that_encodes_to_it():
    codes = torch.arange(16, dtype=torch.uint8)
    assert nvfp4.e2m1_decode(codes).tolist() == VALUES + [-value for value in VALUES]
    assert nvfp4.e2m1_encode(nvfp4.e2m1_decode(codes)).equal(codes)


@pytest.mark.parametrize("midpoint, code", MIDPOINTS.items())
def test_a_midpoint_goes_to_the_even_code_and_its_neighbours_to_the_nearer_one(midpoint, code):
    below, above = (float(np.nextafter(np.float32(midpoint), np.float32(end))) for end in (0, 9))
    lower = list(MIDPOINTS).index(midpoint)
    assert [code_of(below), code_of(midpoint), code_of(above)] == [lower, code, lower + 1]
    assert [code_of(-below), code_of(-midpoint), code_of(-above)] == [
        lower + 8,
        code + 8,
        lower + 9,
    ]


def test_infinities_saturate_and_zero_keeps_its_sign():
    assert [code_of(x) for x in (math.inf, 1e30, -math.inf, -7.0, 0.0, -0.0)] == [
        7,
        7,
        15,
        15,
        0,
        8,
    ]


def test_a_nan_of_either_sign_is_positive_six():
    nans = bits_as_float(0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0xFFFFFFFF)
    assert nvfp4.e2m1_encode(nans).tolist() == [7] * 5


@given(st.floats(-8, 8, width=32))
def test_no_value_is_nearer_than_the_chosen_one(x):
    chosen = float(nvfp4.e2m1_decode(nvfp4.e2m1_encode(torch.tensor([x])))[0])
    assert abs(chosen - x) == min(abs(sign * value - x) for value in VALUES for sign in (1, -1))


def test_even_elements_fill_the_low_nibbles():
    codes = torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8)
    packed = nvfp4.pack_e2m1(codes)
    assert packed.tolist() == [[0x21, 0x43]]
    assert nvfp4.unpack_e2m1(packed).equal(codes)


def test_an_odd_number_of_codes_is_refused():
    with pytest.raises(ValueError, match="K must be even"):
        nvfp4.pack_e2m1(torch.zeros(2, 3, dtype=torch.uint8))


# ---------------------------------------------------------------- layout of scales


@pytest.mark.parametrize("rows, groups", [(1, 1), (128, 4), (129, 5), (300, 12), (127, 7), (0, 4)])
def test_scales_come_back_from_their_tiles(rows, groups):
    scales = torch.randint(1, 127, (rows, groups), dtype=torch.uint8)
    swizzled = nvfp4.swizzle_scales(scales)
    assert swizzled.shape == (-(-rows // 128) * 128, -(-groups // 4) * 4)
    assert nvfp4.unswizzle_scales(swizzled, rows, groups).equal(scales)
    assert int((swizzled != 0).sum()) == rows * groups


def test_a_scale_lies_where_the_tile_format_says():
    scales = torch.zeros(256, 8, dtype=torch.uint8)
    row, column = 128 + 70, 6
    scales[row, column] = 1
    second_row_of_tiles, second_tile = 2 * 512, 512
    in_tile = 16 * (70 % 32) + 4 * (70 // 32) + column % 4
    place = nvfp4.swizzle_scales(scales).flatten().argmax()
    assert int(place) == second_row_of_tiles + second_tile + in_tile


def test_tiles_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="tiles of"):
        nvfp4.unswizzle_scales(torch.zeros(128, 4, dtype=torch.uint8), 129, 4)


# ---------------------------------------------------------------- quantising


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantising_follows_the_formula_value_by_value(dtype):
    x = torch.randn(5, 48).mul(3).to(dtype)
    global_scale = nvfp4.nvfp4_global_scale(x.abs().max())
    packed, scales = nvfp4.nvfp4_quantize(x, global_scale.view(1))
    codes = nvfp4.unpack_e2m1(packed)
    f32 = np.float32
    for row, column in np.ndindex(5, 48):
        group = x[row, column // 16 * 16 :][:16].float().numpy()
        scale = np.abs(group).max() * (f32(global_scale) / f32(6))
        scale = float(torch.tensor(min(scale, f32(448))).to(torch.float8_e4m3fn))
        assert float(scales[row, column // 16]) == scale
        scaled = f32(float(x[row, column])) * (f32(global_scale) / f32(scale))
        assert int(codes[row, column]) == code_of(float(scaled))


def test_the_largest_magnitude_of_a_tensor_is_kept_exactly():
    x = torch.randn(8, 64)
    x[3, 17] = 11.0
    global_scale = nvfp4.nvfp4_global_scale(x.abs().max()).view(1)
    held = nvfp4.nvfp4_dequantize(*nvfp4.nvfp4_quantize(x, global_scale), global_scale)
    assert float(held[3, 17]) == pytest.approx(11.0, rel=1e-6)


def test_no_element_is_off_by_more_than_a_step_of_its_group():
    x = torch.randn(64, 256)
    global_scale = nvfp4.nvfp4_global_scale(x.abs().max()).view(1)
    held = nvfp4.nvfp4_dequantize(*nvfp4.nvfp4_quantize(x, global_scale), global_scale)
    # Steps are at most 2 of 6, so values are off by 1 of 6; an E4M3 scale by 2^-4.
    amax = x.view(64, -1, 16).abs().amax(-1, keepdim=True)
    bound = amax * (1 / 6) * (1 + 2**-4) + amax * 2**-4
    assert bool(((held - x).view(64, -1, 16).abs() <= bound).all())


def test_a_group_of_zeros_has_scale_zero_and_keeps_signs():
    x = torch.zeros(1, 32)
    x[0, 1] = -0.0
    x[0, 16:] = 1.0
    packed, scales = nvfp4.nvfp4_quantize(x, torch.tensor([1.0]))
    assert float(scales[0, 0]) == 0
    assert nvfp4.unpack_e2m1(packed)[0, :3].tolist() == [0, 8, 0]


def test_a_nan_shows_in_its_group_alone():
    x = torch.ones(1, 48)
    x[0, 20] = math.nan
    packed, scales = nvfp4.nvfp4_quantize(x, torch.tensor([2.0]))
    assert scales.float().isnan().tolist() == [[False, True, False]]
    held = nvfp4.nvfp4_dequantize(packed, scales, torch.tensor([2.0]))
    assert held.isnan().view(3, 16).all(1).tolist() == [False, True, False]


def test_infinity_saturates_and_leaves_other_groups_alone():
    x = torch.ones(1, 32)
    x[0, 3] = math.inf
    packed, scales = nvfp4.nvfp4_quantize(x, torch.tensor([1.0]))
    assert float(scales[0, 0]) == 448
    assert nvfp4.unpack_e2m1(packed)[0, 3] == 7
    assert nvfp4.unpack_e2m1(packed)[0, 16:].unique().tolist() == [7]


def test_swizzled_and_linear_scales_are_the_same_numbers():
    x = torch.randn(130, 80)
    packed, linear = nvfp4.nvfp4_quantize(x, torch.tensor([100.0]))
    again, swizzled = nvfp4.nvfp4_quantize(x, torch.tensor([100.0]), is_swizzled=True)
    assert again.equal(packed)
    assert (
        nvfp4.unswizzle_scales(swizzled, 130, 5).view(torch.uint8).equal(linear.view(torch.uint8))
    )


@pytest.mark.parametrize("shape", [(4, 24), (16,)])
def test_columns_that_are_no_whole_groups_are_refused(shape):
    with pytest.raises(ValueError, match="multiple of 16"):
        nvfp4.nvfp4_quantize(torch.zeros(shape), torch.tensor([1.0]))


# ---------------------------------------------------------------- experts


def test_experts_are_quantised_as_if_each_were_alone():
    x = torch.randn(200, 64)
    offsets = torch.tensor([0, 0, 130, 131, 200], dtype=torch.int32)
    global_scales = torch.tensor([1.0, 50.0, 80.0, 7.0])
    packed, scales = nvfp4.nvfp4_quantize_grouped(x, global_scales, offsets)
    assert scales.shape == (256 + 128 + 128, 4)
    for expert, (begin, end), first in (
        (1, (0, 130), 0),
        (2, (130, 131), 256),
        (3, (131, 200), 384),
    ):
        alone = nvfp4.nvfp4_quantize(x[begin:end], global_scales[expert : expert + 1], True)
        assert packed[begin:end].equal(alone[0])
        place = slice(first, first + alone[1].shape[0])
        assert scales[place].view(torch.uint8).equal(alone[1].view(torch.uint8))


def test_rows_past_the_last_expert_s_are_left_out():
    x, offsets = torch.randn(9, 32), torch.tensor([0, 2, 7])
    global_scales = torch.tensor([30.0, 70.0])
    packed, scales = nvfp4.nvfp4_quantize_grouped(x, global_scales, offsets)
    wanted = nvfp4.nvfp4_quantize_grouped(x[:7], global_scales, offsets)
    assert packed.equal(wanted[0])
    assert scales.view(torch.uint8).equal(wanted[1].view(torch.uint8))


def test_scales_of_many_matrices_are_swizzled_each_alone():
    scales = torch.randint(0, 127, (3, 130, 6), dtype=torch.uint8).view(torch.float8_e4m3fn)
    swizzled = nvfp4.swizzle_scales(scales)
    assert swizzled.shape == (3, 256, 8)
    for one, found in zip(scales, swizzled, strict=True):
        wanted = nvfp4.swizzle_scales(one)
        assert found.view(torch.uint8).equal(wanted.view(torch.uint8))


@given(st.lists(st.integers(0, 400), min_size=1, max_size=12))
def test_the_bound_on_scale_rows_holds_for_every_routing(counts):
    rows = sum(-(-count // 128) * 128 for count in counts)
    assert rows <= nvfp4.max_grouped_scale_rows(sum(counts), len(counts))


@pytest.mark.parametrize("offsets", [[1, 4], [0, 5], [0, 5, 2, 4]])
def test_offsets_that_are_not_of_the_rows_are_refused(offsets):
    with pytest.raises(ValueError, match="expert_offsets"):
        nvfp4.nvfp4_quantize_grouped(
            torch.zeros(4, 16), torch.ones(len(offsets) - 1), torch.tensor(offsets)
        )
