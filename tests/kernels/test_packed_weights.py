"""Weights of two codes a byte: widened exactly, and packed as checkpoints pack them."""

import pytest
import torch

from vllm.formats.weight_format import WeightFormat
from vllm.kernels.interface import LinearTensors
from vllm.ops import packed_weights as packed
from vllm.ops.nvfp4 import e2m1_decode, pack_e2m1

CODES = torch.arange(16, dtype=torch.uint8)
GROUP = WeightFormat.parse("int4-group[16]")


def random_codes(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)


def test_every_code_less_every_zero_point_is_exact():
    # Row z and group z have the zero point z; every group has every code.
    zeros = CODES.expand(16, 16).contiguous()
    tensors = LinearTensors(GROUP, pack_e2m1(CODES.repeat(16, 16)), (16,), zero_points=zeros)
    tensors.scales = torch.ones(16, 16)
    found = packed.element_values(tensors).float().unflatten(1, (16, 16))
    assert torch.equal(found, (CODES.float() - zeros.float().unsqueeze(-1)))


def test_without_zero_points_it_is_8():
    tensors = LinearTensors(GROUP, pack_e2m1(CODES.unsqueeze(0)), (1,), torch.ones(1, 1))
    assert packed.element_values(tensors).float().tolist() == [[code - 8 for code in range(16)]]


def test_every_pair_of_e2m1_codes_is_exact():
    every_byte = torch.arange(256, dtype=torch.uint8).view(16, 16)
    codes = torch.stack((every_byte & 15, every_byte >> 4), -1).flatten(1)
    found = packed.element_values(LinearTensors(WeightFormat("nvfp4"), every_byte, (16,)))
    assert found.dtype == torch.float8_e4m3fn
    assert torch.equal(found.float(), e2m1_decode(codes))


def test_an_int32_holds_eight_columns_from_its_lowest_bits_on():
    assert packed.unpack_int32(torch.tensor([[0x76543210]])).tolist() == [list(range(8))]
    codes = random_codes(3, 32)
    assert torch.equal(packed.unpack_int32(packed.pack_int32(codes)), codes)


def test_zero_points_lie_along_rows_and_what_fills_them_up_is_dropped():
    stored = torch.tensor([[0x76543210, 0x11111111], [0x00000098, 0x00000022]], dtype=torch.int32)
    zeros = packed.unpack_rows_int32(stored, 10)
    assert zeros.T.tolist() == [list(range(10)), [1] * 8 + [2] * 2]


def test_an_int32_of_awq_holds_even_rows_first():
    assert packed.unpack_awq(torch.tensor([[0x75316420]])).flatten().tolist() == list(range(8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int4_codes_are_the_nearest_to_the_scale_as_it_is_stored(dtype):
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    codes, scales = packed.int4_quantize(weight, 32)
    assert scales.dtype == dtype and scales.shape == (5, 2)
    step = scales.float().repeat_interleave(32, 1)
    error = ((codes.float() - 8) * step - weight.float()).abs()
    is_cut = (codes == 15) & (weight.float() > 7 * step)
    assert bool((error <= step * 0.5001)[~is_cut].all())
    assert bool((error <= step * 0.54)[is_cut].all()), "the stored scale is rounded"
