"""Linear layers of int8 that stay int8: the bits of the weight in bfloat16, at half the size."""

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


@pytest.mark.parametrize("has_zero_points", [False, True])
@pytest.mark.parametrize("weight_format,bits", [("int8-channel", 8), ("int8-group[32]", 8.5)])
def test_a_layer_keeps_its_bits_and_takes_eight_for_a_weight(weight_format, bits, has_zero_points):
    tensors, _ = make_linear(weight_format, (512,), 1024)
    tensors.scales = tensors.scales.half().float()
    if not has_zero_points:
        tensors.zero_points = None
    packed = pack_tensors(tensors)
    of_rows = 2 * 4 * 512
    is_narrow = packed.num_bytes <= 512 * 1024 * bits / 8 + of_rows
    assert is_narrow == (tensors.zero_points is None)
    x = torch.randn(3, 1024)
    expected = cpu_ops.linear(x, pack_with(cpu_ops.pack_linear, tensors))
    assert torch.equal(cpu_ops.linear(x, packed), expected)
