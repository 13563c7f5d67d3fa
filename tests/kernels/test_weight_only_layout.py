"""Weights packed for the weight-only GEMM, and the backend over them, on the CPU.

`lanes_of` widens packed weights in the steps of csrc/gemm/weight_only_codes.cuh, lane by lane, so
that layout and kernel are held to one description.
"""

import numpy as np
import pytest
import torch
from weight_only_cases import (
    FORMATS,
    INT8,
    SHARDS,
    make_linear,
    make_moe,
    make_spread_mxfp4,
    wide_of,
)

from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.report.question import parse_lib
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import LinearProblem, MoEProblem
from vllm.kernels.select.reason import Why
from vllm.kernels.select.select import select
from vllm.machine import Device, Libs
from vllm.ops.weight_only_layout import (
    e5m3_decode,
    e5m3_encode,
    pack_codes,
    pack_experts,
    pack_weight,
    unpack_codes,
    widen_weight,
)
from vllm.ops.weight_only_ops import multiply_experts

WINNER = Candidate("marlin", None)
SIZES = [(16, 64), (48, 128), (40, 80), (129, 336)]


# ---------------------------------------------------------------- layout


@pytest.mark.parametrize("format_name", ["fp8", "nvfp4", "int4", "w4a8"])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_codes_come_back_with_zeros_around_them(format_name, n, k):
    codes = torch.randint(0, 256 if format_name == "fp8" else 16, (n, k), dtype=torch.uint8)
    packed = pack_codes(codes, format_name)
    assert packed.shape == (-(-n // 16), -(-k // 64), 2 if format_name == "fp8" else 1, 32, 16)
    back = unpack_codes(packed, format_name)
    assert torch.equal(back[:n, :k], codes)
    assert back.sum() == codes.sum()


def pairs_of(words, format_name, is_bf16):
    """The four registers of pairs that `widen` makes before it multiplies by scales: uint32
    [..., 4]; words: uint32 [..., 1] of 4 bits, [..., 2] of FP8."""
    u = np.uint32
    if format_name == "int4":
        plus = u(0x43004300 if is_bf16 else 0x64006400)
        return np.stack([(words[..., 0] >> u(4 * i) & u(0x000F000F)) | plus for i in range(4)], -1)
    signs = u(0x80008000)
    if format_name == "fp8":
        shift, mask = (4, 0x07F007F0) if is_bf16 else (1, 0x3F803F80)
        tops = np.stack([words, words << u(8)], -1).reshape(*words.shape[:-1], 4)
        return (tops & signs) | (tops >> u(shift) & u(mask))
    v = words[..., 0]
    turned = (v >> u(4)) | (v << u(28))
    if is_bf16:
        last = (v >> u(6) & u(0x01000100)) | (v << u(2) & u(0x80C080C0))
        return np.stack([*(part & u(0x81C081C0) for part in (v, turned, v << u(6))), last], -1)
    magnitudes = u(0x0E000E00)
    last = (v >> u(3) & u(0x08000800)) | (v << u(5) & u(0x06000600)) | (v << u(2) & signs)
    parts = ((v << u(3), v), (v >> u(1), turned), (v << u(9), v << u(6)))
    return np.stack([*((a & magnitudes) | (b & signs) for a, b in parts), last], -1)


def floats_of(pairs, is_bf16):
    """float64 [..., 4, 2] of registers of two bf16 or fp16."""
    halves = np.stack([pairs & np.uint32(0xFFFF), pairs >> np.uint32(16)], -1)
    if is_bf16:
        return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return halves.astype(np.uint16).view(np.float16).astype(np.float64)


def lanes_of(packed, is_bf16):
    """The weight [N, K], float64, as lanes widen it for their products."""
    name, codes = packed.format, packed.codes.numpy()
    tiles, column_tiles, loads = codes.shape[:3]
    words = codes.view("<u4").reshape(tiles, column_tiles, loads, 32, 4)
    wide = np.zeros((tiles * 16, column_tiles * 64))
    for product in range(4):
        half, i = divmod(product, 2)
        own = words[:, :, 0, :, product, None]
        if name == "fp8":
            own = words[:, :, half, :, 2 * i : 2 * i + 2]
        values = floats_of(pairs_of(own, name, is_bf16), is_bf16)
        for lane in range(32):
            group, quad = divmod(lane, 4)
            column = quad * 16 + half * 8 if name == "nvfp4" else half * 32 + quad * 8
            for register in range(4):
                for element in range(2):
                    row = group + 8 * (register % 2)
                    place = column + 4 * i + 2 * (register // 2) + element
                    wide[row::16, place::64] = values[:, :, lane, register, element]
    return wide


# What values lack before scales: exponents begin elsewhere (weight_only_codes.cuh).
LACKS = {
    ("nvfp4", True): 2.0**126, ("nvfp4", False): 2.0**14,
    ("fp8", True): 2.0**120, ("fp8", False): 2.0**8,
}  # fmt: skip


@pytest.mark.parametrize("is_bf16", [True, False], ids=["bf16", "fp16"])
@pytest.mark.parametrize("format_name", ["fp8", "nvfp4", "int4"])
def test_every_code_is_widened_exactly_where_the_product_wants_it(format_name, is_bf16):
    num_codes = 256 if format_name == "fp8" else 16
    codes = torch.arange(48 * 192).remainder(num_codes).to(torch.uint8)
    codes = codes[torch.randperm(48 * 192)].view(48, 192)
    if format_name == "fp8":
        codes[(codes & 0x7F) == 0x7F] = 0
    tensors, _ = make_linear("nvfp4", (48,), 192)
    packed = pack_weight(tensors)
    packed = type(packed)(format_name, 48, 192, pack_codes(codes, format_name), None, None)
    if format_name == "fp8":
        wanted = codes.view(torch.float8_e4m3fn).double()
    elif format_name == "int4":
        wanted = codes.double() + (128 if is_bf16 else 1024)
    else:
        magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()
        wanted = magnitudes[(codes & 7).long()] * torch.where(codes < 8, 1.0, -1.0)
    found = torch.from_numpy(lanes_of(packed, is_bf16)) * LACKS.get((format_name, is_bf16), 1)
    assert torch.equal(found, wanted)


def test_every_scale_of_nvfp4_has_a_byte_that_the_kernel_turns_into_it():
    scales = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = e5m3_encode(scales)
    assert torch.equal(e5m3_decode(codes)[1:], scales.float()[1:])
    as_bf16 = (codes.int() * 16 + (223 << 7)) << 16
    assert torch.equal(as_bf16.view(torch.float32)[1:], scales.float()[1:] * 2.0**118)
    as_fp16 = (codes.int() * 128).short().view(torch.float16)
    assert torch.equal(as_fp16.float()[1:], scales.float()[1:] * 2.0**7)


def test_mxfp4_is_exact_with_scales_of_24_octaves_in_a_row():
    for shift in (-111, -30, 0, 100):
        tensors, _ = make_spread_mxfp4(num_rows=20)
        tensors.scales = (tensors.scales.int() + shift).to(torch.uint8)
        assert torch.equal(widen_weight(pack_weight(tensors)), wide_of(tensors))


def test_groups_of_mxfp4_that_are_far_below_others_of_their_row_are_rounded():
    tensors, _ = make_linear("mxfp4", (16,), 128)
    tensors.weight[:] = 0x63
    tensors.scales[:] = torch.tensor([127, 127 - 24, 127 - 26, 127 - 40], dtype=torch.uint8)
    found = widen_weight(pack_weight(tensors))[0, ::2]  # of codes for 1.5
    steps = [1.5, 1.5 * 2.0**-24, 0.5 * 2.0**-24, 0]  # 1.5 / 4 is between 0 and 0.5
    assert torch.equal(found, torch.tensor(steps).repeat_interleave(16))


def test_a_group_of_mxfp4_zeros_may_have_any_scale():
    tensors, _ = make_linear("mxfp4", (16,), 128)
    tensors.weight[:, :16] &= 0x88
    tensors.scales[:, 0] = 254
    assert torch.equal(widen_weight(pack_weight(tensors)), wide_of(tensors))


@pytest.mark.parametrize("shards", SHARDS, ids=str)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_packed_weights_are_the_numbers_of_the_format(weight_format, shards):
    tensors, wanted = make_linear(weight_format, shards, 416)
    found = widen_weight(pack_weight(tensors))
    assert found.shape == wanted.shape
    # Two scales of nvfp4 are rounded once or twice, by the order of their products.
    assert (found - wanted).abs().max() <= 2.0**-23 * wanted.abs().max()
    assert weight_format == "nvfp4" or torch.equal(found, wanted)
    if weight_format.startswith("int4"):
        assert torch.equal(widen_weight(pack_weight(tensors, by_fp8=True)), wanted)


@pytest.mark.parametrize(("n", "k"), [(16, 64), (40, 64), (16, 128), (100, 320)])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_every_part_of_a_packed_weight_is_contiguous(weight_format, n, k):
    packed = pack_weight(make_linear(weight_format, (n,), k)[0])
    for part in (packed.codes, packed.scales, packed.row_factors):
        assert part is None or part.is_contiguous()


@pytest.mark.parametrize(("rows", "columns"), [((64, 32), 0), ((0, 0), 64), ((96, 16), 32)])
def test_shards_that_begin_inside_a_scale_block_are_packed_exactly(rows, columns):
    tensors, wanted = make_linear("fp8-block", (192, 80), 352, rows, columns)
    assert torch.equal(widen_weight(pack_weight(tensors)), wanted)


def test_rows_of_a_tile_share_a_scale_where_blocks_allow_it():
    whole = pack_weight(make_linear("fp8-block", (256, 144), 256)[0])
    cut = pack_weight(make_linear("fp8-block", (256, 136, 128), 256)[0])
    assert (whole.scales.shape[2], cut.scales.shape[2]) == (1, 16)


def test_groups_whose_scale_is_zero_are_zeros():
    tensors, _ = make_linear("nvfp4", (32,), 64)
    tensors.scales[3] = 0
    assert not widen_weight(pack_weight(tensors))[3].any()


def test_a_weight_with_nan_is_refused():
    tensors, _ = make_linear("fp8-channel", (32,), 64)
    tensors.weight.view(torch.uint8)[5, 7] = 0xFF
    with pytest.raises(ValueError, match="the weight holds NaN"):
        pack_weight(tensors)
    moe, _ = make_moe("fp8-channel", 2, 64, 32)
    moe.down.view(torch.uint8)[1, 0, 0] = 0x7F
    with pytest.raises(ValueError, match="expert 1: the weight holds NaN"):
        pack_experts((moe.expert(i)[1] for i in range(2)), 2)


# ---------------------------------------------------------------- the backend


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 300])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_the_backend_multiplies_what_it_packed(weight_format, num_tokens):
    tensors, wanted = make_linear(weight_format, (48, 41), 224)
    tensors.bias = torch.randn(89)
    problem = LinearProblem(89, 224, WeightFormat.parse(weight_format), parts=(48, 41))
    apply = registry.backend("marlin").linear(problem, tensors, WINNER)
    x = torch.randn(num_tokens, 224).bfloat16()
    expected = x.float() @ wanted.T + tensors.bias
    error = (apply(x).float() - expected).norm()
    assert error <= 8e-3 * expected.norm()


@pytest.mark.parametrize("num_tokens", [0, 1, 300])
@pytest.mark.parametrize("weight_format", ["int4-group[32]", "int4-group[128]"])
def test_fp8_activations_are_rounded_per_token_as_the_emulation_of_that_chip_has_it(
    weight_format, num_tokens
):
    tensors, wide = make_linear(weight_format, (48, 41), 256)
    tensors.bias = torch.randn(89) / 100
    problem = LinearProblem(89, 256, WeightFormat.parse(weight_format), parts=(48, 41))
    winner = Candidate("marlin-w4a8", ActScheme.DYNAMIC_TOKEN)
    x = torch.randn(num_tokens, 256).bfloat16() * torch.rand(num_tokens, 1)
    found = registry.backend("marlin-w4a8").linear(problem, tensors, winner)(x.bfloat16())
    assert found.shape == (num_tokens, 89) and found.dtype == torch.bfloat16
    emulated = registry.backend("emulation").linear(problem, tensors, winner)(x.bfloat16())
    assert (found.float() - emulated.float()).norm() <= 4e-3 * emulated.float().norm()
    exact = x.bfloat16().float() @ wide.T + tensors.bias
    lost = (found.float() - exact).norm() / exact.norm()
    assert not num_tokens or 0.01 < lost < 0.05  # E4M3 has three bits


def test_experts_are_packed_one_by_one():
    tensors, _ = make_moe("nvfp4", 3, 96, 48)
    packed = pack_experts((tensors.expert(i)[0] for i in range(3)), 3)
    for index in range(3):
        own = pack_weight(tensors.expert(index)[0])
        assert torch.equal(packed.codes[index], own.codes)
        assert torch.equal(packed.scales[index], own.scales)
        assert torch.equal(packed.row_factors[index], own.row_factors)


# ---------------------------------------------------------------- who takes it


def whys(problem, backend="marlin", device="sm_90", libs="native=0.1+90a,triton=3.6"):
    libs = Libs.of(map(parse_lib, libs.split(",")))
    specs = registry.specs(problem.family)
    decision = select(problem, Device.parse(device), libs, Policy(), specs)
    (found,) = [c for c in decision.candidates if c.backend == backend]
    return {reason.why for reason in found.reasons}


@pytest.mark.parametrize("weight_format", FORMATS)
def test_every_format_is_taken_where_the_code_is_there(weight_format):
    weight = WeightFormat.parse(weight_format)
    assert not whys(LinearProblem(1000, 4096, weight))
    assert not whys(MoEProblem(8, 2, 512, 256, weight))
    assert whys(LinearProblem(1000, 4096, weight), device="sm_80") == {Why.LIBRARY}


@pytest.mark.parametrize(
    "problem",
    [
        LinearProblem(64, 4100, WeightFormat.parse("fp8-channel")),
        LinearProblem(64, 4096, WeightFormat.parse("fp8-block[128x48]")),
        LinearProblem(64, 4096, WeightFormat.parse("int4-group[16]")),
        LinearProblem(64, 144, WeightFormat.parse("fp8-block"), cut_k=2),
        MoEProblem(8, 2, 512, 144, WeightFormat.parse("fp8-block"), cut=2),
    ],
    ids=str,
)
def test_sizes_and_groups_that_lanes_cannot_hold_are_of_the_shape(problem):
    assert whys(problem) == {Why.SHAPE}


def test_code_for_fp8_activations_is_asked_for_by_its_own_name():
    w4a8 = LinearProblem(
        1000, 4096, WeightFormat.parse("int4-group[128]"), (ActScheme.DYNAMIC_TOKEN, ActScheme.NONE)
    )
    for native, found in (("marlin_w4a8_gemm/89", set()), ("marlin_gemm/89", {Why.LIBRARY})):
        assert whys(w4a8, "marlin-w4a8", "sm_89", f"native=0.1+{native}") == found


# ---------------------------------------------------------------- int8


@pytest.mark.parametrize("name", INT8)
@pytest.mark.parametrize("num_tokens", [3, 100])
@pytest.mark.parametrize("k", [384, 416])
def test_int8_is_multiplied_as_two_int4_numbers(name, num_tokens, k):
    if k % 128 and name == "int8-group[128]":
        k = 640
    tensors, wide = make_linear(name, (48, 40), k)
    packed = pack_weight(tensors)
    assert (packed.format, packed.is_split, packed.num_columns) == ("int4", True, 2 * k)
    assert packed.codes.nbytes <= 96 * (k + 32)
    halves = widen_weight(packed).double().unflatten(1, (2, k)).sum(1)
    assert (halves - wide).norm() <= 2.0**-20 * wide.norm()  # scales lose their last four bits
    problem = LinearProblem(88, k, tensors.format)
    apply = registry.backend("marlin").linear(problem, tensors, WINNER)
    x = torch.randn(num_tokens, k)
    expected = x.double() @ wide.T.double()
    assert (apply(x) - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize(("k", "is_taken"), [(4096, True), (4112, False)])
def test_int8_of_no_whole_groups_of_32_is_rejected(k, is_taken):
    problem = LinearProblem(4096, k, WeightFormat.parse("int8-channel"), dtype="bf16")
    reasons = registry.backend("marlin").SPECS[0].check(problem)
    assert is_taken == (not reasons)
    if reasons:
        assert "4112 columns of int8, and it takes multiples of 32" in reasons[0].text


def test_experts_in_int8_are_multiplied_as_two_int4_numbers():
    experts = [make_linear("int8-group[32]", (40,), 128) for _ in range(2)]
    packed = pack_experts((tensors for tensors, _ in experts), 2)
    x, order = torch.randn(5, 128), torch.tensor([3, 9, 0, 4, 1, 2, 7, 8, 6, 5], dtype=torch.int32)
    blocks = torch.tensor([[1, 0], [0, 6], [6, 10]], dtype=torch.int32)
    out = multiply_experts(x, packed, blocks, 8, 10, order, top_k=2)
    for expert, first, end in blocks.T.tolist():
        expected = x[order[first:end].long() // 2].double() @ experts[expert][1].double().T
        assert (out[first:end] - expected).norm() <= 1e-5 * expected.norm()
