"""What humming-kernels is told of a weight, on the CPU: read back by its formats, it is the weight.
Where the library is installed, its own description of the tensors accepts them too.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from weight_only_cases import make_linear, wide_of

from vllm.formats.scales import Scales
from vllm.kernels.backends.humming import describe
from vllm.ops.nvfp4 import e2m1_decode
from vllm.ops.scale_rounding import requant_error, requantised

FORMATS = ("fp8-tensor", "fp8-channel", "fp8-block", "nvfp4", "int4-group[32]", "int4-group[128]")
TYPES = (torch.bfloat16, torch.float16)
TAKEN = [*product(FORMATS, TYPES), ("mxfp4", torch.bfloat16)]


def made(name, shards=(128, 256, 128), k=384):
    torch.manual_seed(0)
    return make_linear(name, shards, k)[0]


def fields(packed, bits, axis):
    """Numbers of `bits` bits from the lowest of each int32 on, along `axis`."""
    moved = packed.transpose(axis, -1).contiguous().numpy().view("<u4")
    parts = [(moved >> (bits * i)) & (2**bits - 1) for i in range(32 // bits)]
    stacked = torch.stack([torch.from_numpy(part.astype("int64")) for part in parts], -1)
    return stacked.flatten(-2).transpose(axis, -1)


def read_back(description, stored):
    """float64 [N, K] of the numbers that these tensors stand for."""
    bits = 8 if description["b_dtype"] == "float8e4m3" else 4
    codes = fields(stored["weight"], bits, 1)
    if bits == 8:
        values = codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
    elif description["b_dtype"] == "float4e2m1":
        values = e2m1_decode(codes.to(torch.uint8)).double()
    elif description.get("has_zero_point"):
        zeros = fields(stored["zero_point"], 4, 0)
        values = codes - zeros.repeat_interleave(description["weight_scale_group_size"], 1)
    else:
        values = codes - 8
    scales = stored["weight_scale"].double()
    if description["weight_scale_type"] != "tensor":
        rows, columns = (size // own for size, own in zip(values.shape, scales.shape))
        scales = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    second = stored.get("weight_scale_2")
    if second is not None:
        scales = scales * second.double().reshape(-1, 1)
    return values * scales


@pytest.mark.parametrize(("name", "dtype"), TAKEN, ids=str)
def test_the_tensors_stand_for_the_weight_with_scales_in_the_type_of_activations(name, dtype):
    tensors = made(name)
    found = read_back(*describe(requantised(tensors, Scales.ACTIVATION, dtype), dtype))
    stored = wide_of(tensors).double()
    error = (found - stored).norm() / stored.norm()
    told = requant_error(tensors, Scales.ACTIVATION, dtype)
    assert found.shape == stored.shape
    assert abs(float(error) - told.relative) <= 1e-6
    worst, least = float((found - stored).abs().max()), 2.0**-22 * float(stored.abs().max())
    assert worst == pytest.approx(told.max_abs, rel=1e-4, abs=least)
    assert float(error) <= 2.0 ** (-8 if dtype == torch.bfloat16 else -11)


@pytest.mark.parametrize(("name", "dtype"), TAKEN, ids=str)
def test_scales_that_the_type_holds_stay_what_they_are(name, dtype):
    tensors = made(name)
    if tensors.scales.dtype != torch.uint8:
        tensors.scales = tensors.scales.to(dtype).float().to(tensors.scales.dtype)
    if tensors.global_scales is not None:
        tensors.global_scales = tensors.global_scales.to(dtype).float()
    error = requant_error(tensors, Scales.ACTIVATION, dtype)
    assert error.is_exact and error.relative == error.max_abs == 0
    found = read_back(*describe(requantised(tensors, Scales.ACTIVATION, dtype), dtype))
    # Two scales of nvfp4 are multiplied in float32 in one of them.
    torch.testing.assert_close(found, wide_of(tensors).double(), rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-block", "mxfp4", "nvfp4"])
def test_one_scale_for_all_rows_and_those_of_blocks_are_never_rounded(name):
    tensors = made(name, (384,))
    for dtype in TYPES:
        assert requantised(tensors, Scales.ACTIVATION, dtype) is tensors
        assert requant_error(tensors, Scales.ACTIVATION, dtype).is_exact


def test_small_scales_keep_all_bits_of_fp16():
    tensors = made("fp8-channel")
    tensors.scales = tensors.scales * 2.0**-20
    assert requant_error(tensors, Scales.ACTIVATION, torch.float16).relative < 2.0**-11


def test_a_weight_with_nan_is_refused():
    tensors = made("fp8-channel")
    tensors.weight.view(torch.uint8)[5, 7] = 0xFF
    with pytest.raises(ValueError, match="the weight holds NaN"):
        describe(tensors, torch.bfloat16)


def test_a_weight_that_is_a_view_is_read_as_it_is_seen():
    tensors = made("nvfp4", (128,), 256)
    rows = torch.arange(0, 128, 2)
    part = replace(
        tensors, weight=tensors.weight[::2], scales=tensors.scales[::2], shard_rows=(64,)
    )
    found = read_back(*describe(part, torch.bfloat16))
    torch.testing.assert_close(found, wide_of(tensors)[rows].double(), rtol=2.0**-23, atol=0)


@pytest.mark.parametrize(("name", "dtype"), TAKEN, ids=str)
def test_the_library_takes_the_tensors_for_what_it_is_told(name, dtype):
    schema = pytest.importorskip("humming.schema").HummingWeightSchema
    tensors = made(name)
    description, stored = describe(requantised(tensors, Scales.ACTIVATION, dtype), dtype)
    told = schema(**description)
    told.validate_tensors(stored, 512, 384, dtype)
    assert stored.keys() == told.get_tensors_attrs(512, 384, dtype).keys()
