"""csrc's weight-only GEMM, kernels and launches, run thread by thread on a CPU.

CUDA is emulated (emulated_cuda/), instructions among it: this checks every index and number of the
code, not that a GPU does what PTX says (tests/kernels/gpu/test_marlin.py).
"""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from native import emulated
from native.emulated import compiled
from slow import quick
from weight_only_cases import FORMATS, FP8, fill_blocks, make_linear, make_spread_mxfp4, wide_of

from vllm._custom_ops import scaled_fp8_quant
from vllm.ops.weight_only_layout import (
    pack_experts,
    pack_weight,
    widen_weight,
)

HERE = Path(__file__).parent
GEMM = HERE.parents[1] / "csrc" / "gemm"
SOURCES = ("weight_only.cu", "weight_only.cuh", "weight_only.h", "weight_only_codes.cuh",
           "weight_only_launch.cuh", "weight_only_tiles.cuh", "weight_only_tokens.cuh",
           "weight_only_w4a8.cu", "weight_only_widen.cuh")  # fmt: skip
CODES = {"fp8": 0, "nvfp4": 1, "int4": 2, "w4a8": 3}
# Of Header in weight_only.cpp.
FIELDS = [
    "is_widen", "code", "is_bf16", "has_clusters", "row_tiles", "splits", "codes", "scales",
    "row_factors", "n", "k", "column_tiles", "groups", "scale_rows", "column_shift", "x",
    "x_scales", "m", "ldx", "bias", "out", "ldo", "blocks", "num_blocks", "block_rows", "order",
    "top_k", "has_blocks_before", "num_sms",
]  # fmt: skip
# int4-group, by activations in E4M3.
W4A8 = ("w4a8[32]", "w4a8[128]")
NUM_TOKENS = [1, 7, 9, 17, 33, 70, 130]
SIZES = [(16, 64), (100, 336)]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weight_only")
    # Apart from the real weight_only_ptx.cuh, in whose place comes the emulated one.
    for name in SOURCES:
        shutil.copy(GEMM / name, folder)
    shutil.copy(HERE / "weight_only.cpp", folder)
    return compiled(folder / "weight_only.cpp", folder)


def call(program, packed, out, x=None, bias=None, blocks=None, order=None, x_scales=None, **values):
    """Fills `out`; raises CalledProcessError with CUDA's error as exit code."""
    header = {
        "code": CODES[packed.format],
        "is_bf16": int(out.dtype == torch.bfloat16),
        "has_clusters": 1,
        "n": packed.num_rows,
        "k": packed.num_columns,
        "column_tiles": packed.codes.shape[-4],
        "groups": 1,
        "scale_rows": 1,
        "column_shift": 31,
        "ldo": out.stride(0),
        "top_k": 1,
        "num_sms": 132,
    }
    if packed.scales is not None and packed.format != "nvfp4":
        header["groups"], header["scale_rows"] = packed.scales.shape[-2:]
        if header["groups"] > 1:
            header["column_shift"] = packed.columns_per_scale.bit_length() - 1
    parts = {"codes": packed.codes, "scales": packed.scales, "row_factors": packed.row_factors,
             "x": x, "x_scales": x_scales, "bias": bias, "blocks": blocks, "order": order,
             "out": out}  # fmt: skip
    if x is not None:
        header["m"], header["ldx"] = x.shape
    if blocks is not None:
        header["num_blocks"] = blocks.shape[1]
    out.copy_(emulated.call(program, FIELDS, header | values, parts, "out"))


def poisoned(m, n, dtype=torch.bfloat16):
    return torch.full((m, n), float("nan"), dtype=dtype)


def powers_of_two(shape, low, high):
    return torch.exp2(torch.randint(low, high, shape).float())


def make(name, shards, k):
    return make_linear(name.replace("w4a8", "int4-group"), shards, k)


def packed_for(name, tensors):
    return pack_weight(tensors, by_fp8=name in W4A8)


def exact_linear(name, shards, k):
    """A weight whose products with small integers are summed in float32 without rounding."""
    tensors, _ = make(name, shards, k)
    if name == "nvfp4":
        tensors.scales = powers_of_two(tensors.scales.shape, -1, 2).to(FP8)
        tensors.global_scales = powers_of_two(tensors.global_scales.shape, -3, 1)
    elif tensors.scales.dtype == torch.uint8:
        tensors.scales = torch.randint_like(tensors.scales, 125, 129)
    else:
        tensors.scales = powers_of_two(tensors.scales.shape, -2, 2)
    if tensors.weight.dtype == FP8:
        tensors.weight = torch.randint(-4, 5, (sum(shards), k)).to(FP8)
    return tensors


def check_products(program, name, shards, k, m, dtype, **values):
    tensors = exact_linear(name, shards, k)
    n = sum(shards)
    x_type, x_scales = (FP8, powers_of_two((m,), -2, 2)) if name in W4A8 else (dtype, None)
    stored, bias = poisoned(m + 1, k + 64, x_type), torch.randint(-8, 9, (n,)).float()
    x = torch.randint(-2, 3, (m, k)).double()
    stored[:m, :k] = x.to(x_type)  # what lies behind a row is not to be read
    out = poisoned(m, n, dtype)
    call(program, packed_for(name, tensors), out, stored, bias, x_scales=x_scales, m=m, **values)
    expected = x @ wide_of(tensors).double().T
    if x_scales is not None:
        expected *= x_scales[:, None]
    expected += bias.double()
    assert torch.equal(out, expected.to(dtype))


@pytest.mark.parametrize("name", [*FORMATS, W4A8[1]])
@pytest.mark.parametrize("m", quick(NUM_TOKENS, NUM_TOKENS[1::6]))
def test_products_of_small_integers_are_exact(program, name, m):
    for n, k in SIZES:
        check_products(program, name, (n,), k, m, torch.bfloat16)
    check_products(program, name, (40, 24), 160, m, torch.float16)


@pytest.mark.parametrize("name", ["fp8-block", "nvfp4", "int4-group[32]", "w4a8[128]"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 1), (2, 2), (2, 8)], ids=str)
def test_every_shape_is_exact(program, name, shape):
    for n, k, m in ((40, 592, 3), (24, 208, 12), (24, 208, 20), (24, 464, 65)):
        values = {"row_tiles": shape[0], "splits": shape[1]}
        check_products(program, name, (n,), k, m, torch.bfloat16, **values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_scales_of_mxfp4_that_are_as_far_apart_as_they_may_be_are_exact(program, dtype):
    tensors, wide = make_spread_mxfp4(num_rows=24)
    x, out = torch.eye(wide.shape[1]).to(dtype), poisoned(wide.shape[1], 24, dtype)
    call(program, pack_weight(tensors), out, x)
    assert torch.equal(out, wide.T.to(dtype)) and torch.equal(out.float(), wide.T)


def test_chips_without_clusters_split_nothing(program):
    for m in (5, 70, 260):
        check_products(program, "nvfp4", (40,), 2048, m, torch.bfloat16, has_clusters=0)
    with pytest.raises(subprocess.CalledProcessError):
        check_products(program, "nvfp4", (40,), 2048, 5, torch.bfloat16, has_clusters=0,
                       row_tiles=1, splits=2)  # fmt: skip


@pytest.mark.parametrize("name", [*FORMATS, W4A8[0]])
@pytest.mark.parametrize(
    "size", quick([(3, 2832), (12, 2832), (20, 1168), (40, 1168), (100, 1168)], [(20, 1168)])
)
def test_more_tiles_of_columns_than_are_in_flight_are_exact(program, name, size):
    m, k = size
    check_products(program, name, (24,), k, m, torch.bfloat16, row_tiles=2, splits=1)


@pytest.mark.parametrize("name", [*FORMATS, *W4A8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_the_error_is_that_of_the_output_type(program, name, dtype):
    tensors, wide = make(name, (32, 17), 352)
    x, x_scales = torch.randn(5, 352).to(dtype), None
    out, factors = poisoned(5, 49, dtype), 1.0
    if name in W4A8:
        x, factors = scaled_fp8_quant(x, use_per_token_if_dynamic=True)
        x_scales = factors.view(-1)
    call(program, packed_for(name, tensors), out, x, x_scales=x_scales)
    expected = x.double() @ wide.double().T * factors
    of_rounding = (expected.to(dtype).double() - expected).norm()
    assert (out.double() - expected).norm() < 1.1 * of_rounding


@pytest.mark.parametrize("name", W4A8)
def test_every_number_of_activations_and_every_weight_less_its_zero_point_is_exact(program, name):
    """A token holds one number of E4M3, besides zeros: its results are that number's products."""
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8)
    numbers = numbers[~numbers.float().isnan()]
    tensors = exact_linear(name, (48,), 256)
    x = torch.zeros(len(numbers), 256, dtype=FP8)
    columns = torch.randperm(256)[: len(numbers)]
    x[torch.arange(len(numbers)), columns] = numbers
    scales = powers_of_two((len(numbers),), -3, 4)
    out = poisoned(len(numbers), 48)
    call(program, packed_for(name, tensors), out, x, x_scales=scales)
    wide = wide_of(tensors)[:, columns].T
    assert torch.equal(out, (numbers.float() * scales)[:, None].mul(wide).bfloat16())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_weight_that_is_widened_is_rounded_once(program, name, dtype):
    packed = pack_weight(make_linear(name, (48, 41), 336)[0])
    for first in (0, 32):
        out = poisoned(89 - first, 336, dtype)
        call(program, packed, out, is_widen=1, splits=first, m=89 - first)
        wanted = widen_weight(packed)[first:]
        # Scales are multiplied in another order: a last bit of float32 before the rounding.
        assert (out.double() - wanted.double()).abs().max() <= 2.0**-8 * wanted.abs().max()
        assert (out == wanted.to(dtype)).float().mean() > 0.999


@pytest.mark.parametrize(("rows", "columns"), [((64, 32), 0), ((), 64), ((96, 16), 32)])
def test_shards_that_begin_inside_a_scale_block_are_multiplied_with_their_own(
    program, rows, columns
):
    tensors, wide = make_linear("fp8-block", (48, 24), 352, rows, columns)
    x, out = torch.randn(4, 352).bfloat16(), poisoned(4, 72)
    call(program, pack_weight(tensors), out, x)
    expected = x.double() @ wide.double().T
    # Rounded twice, with the scale of its block and at the end; another block's is far off.
    assert (out.double() - expected).norm() < 2.0**-8 * expected.norm()


@pytest.mark.parametrize("name", [*FORMATS, W4A8[1]])
@pytest.mark.parametrize("block_rows", [1, 8, 16, 64])
def test_blocks_of_experts_are_exact_and_touch_no_other_rows(program, name, block_rows):
    weights = [exact_linear(name, (24, 24), 160) for _ in range(4)]
    packed = pack_experts(iter(weights), 4, by_fp8=name in W4A8)
    x, order = torch.randint(-2, 3, (30, 160)).bfloat16(), torch.randperm(60).int()
    q, x_scales = x, None
    if name in W4A8:
        q, x_scales = x.to(FP8), powers_of_two((30,), -2, 2)
        x = x * x_scales[:, None]
    blocks = torch.tensor([[2, 0, -1, 3], [3, 20, 0, 40], [3 + block_rows // 2, 37, 60, 41]]).int()
    out, expected = poisoned(60, 48), poisoned(60, 48)
    bias = torch.randint(-8, 9, (4, 48)).float()
    experts = {"block_rows": block_rows, "top_k": 2, "has_blocks_before": block_rows % 2}
    call(program, packed, out, q, bias, blocks, order, x_scales, **experts)
    fill_blocks(expected, x, order, blocks, weights, block_rows, bias)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("name", ["nvfp4", "fp8-block", "int4-group[32]", "w4a8[128]"])
@pytest.mark.parametrize("block_rows", [8, 16])
def test_rows_that_a_thread_block_multiplies_one_after_another_are_exact(program, name, block_rows):
    """Of a chip with one multiprocessor, which holds three thread blocks. More tiles of columns
    than are in flight, and rows that are no multiple of a thread block's."""
    weights = [exact_linear(name, (136, 24), 2832) for _ in range(2)]
    packed = pack_experts(iter(weights), 2, by_fp8=name in W4A8)
    x, order = torch.randint(-1, 2, (9, 2832)).bfloat16(), torch.randperm(18).int()
    q, x_scales = (x.to(FP8), torch.ones(9)) if name in W4A8 else (x, None)
    blocks = torch.tensor([[1], [2], [18]]).int()
    out, expected, bias = poisoned(18, 160), poisoned(18, 160), torch.zeros(2, 160)
    experts = {"block_rows": block_rows, "top_k": 2, "num_sms": 1}
    call(program, packed, out, q, bias, blocks, order, x_scales, **experts)
    fill_blocks(expected, x, order, blocks, weights, block_rows, bias)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())
