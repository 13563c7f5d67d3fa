"""Linear layers of int8 that stay int8: the bits of the same weight in bfloat16, at half its size."""

import pytest
import torch

from tests.weight_only_cases import make_linear
from vllm.kernels.backends.cpu import pack_tensors
from vllm.ops import cpu_ops
from vllm.ops.packed_weights import pack_with


@pytest.mark.parametrize("x_dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("n,k,block_k", [(33, 100, 32), (64, 577, 128), (31, 1001, 1001)])
def test_results_have_the_bits_of_the_same_weight_in_bfloat16(linear_isa, n, k, block_k, x_dtype):
    weight = torch.randint(-128, 128, (n, k)).to(torch.int8)
    layer = torch.rand(n, -(-k // block_k)) + 0.5, block_k, torch.randn(n)
    packed = cpu_ops.pack_linear(weight, *layer)
    wide = cpu_ops.pack_linear(weight.bfloat16(), *layer)
    for m in (1, 2, 8, 9, 40, 129):
        x = torch.randn(m, k).to(x_dtype)
        assert torch.equal(cpu_ops.linear(x, packed), cpu_ops.linear(x, wide)), m


def test_every_value_is_widened_exactly(linear_isa):
    values = torch.arange(-128, 128).to(torch.int8)
    packed = cpu_ops.pack_linear(values.unsqueeze(1))
    for m in (1, 3, 20):
        out = cpu_ops.linear(torch.ones(m, 1), packed)
        assert torch.equal(out, values.float().expand(m, -1))


@pytest.mark.parametrize("weight_format,bits", [("int8-channel", 8), ("int8-group[32]", 9)])
def test_a_weight_takes_its_eight_bits_and_its_scales(weight_format, bits):
    tensors, _ = make_linear(weight_format, (512,), 1024)
    tensors.scales.copy_(tensors.scales.half())
    packed = pack_tensors(tensors)
    expected = pack_with(cpu_ops.pack_linear, tensors)
    assert packed.panels.dtype == (torch.int8 if tensors.zero_points is None else torch.bfloat16)
    if tensors.zero_points is None:
        assert packed.num_bytes <= 512 * 1024 * bits / 8 + 2 * 4 * 512
    x = torch.randn(3, 1024)
    assert torch.equal(cpu_ops.linear(x, packed), cpu_ops.linear(x, expected))
