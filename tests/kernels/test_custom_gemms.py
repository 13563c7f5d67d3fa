"""Products of quantised matrices on the CPU are those of the numbers their formats define."""

import pytest
import torch

from vllm import _custom_ops as ops
from vllm.ops.fp8_quant import per_token_group_fp8_quant
from vllm.ops.nvfp4 import (
    nvfp4_dequantize,
    nvfp4_quantize,
    swizzle_scales,
    unswizzle_scales,
)
from vllm.utils.fp8 import per_block_cast_to_fp8

FP8 = torch.float8_e4m3fn


def fp8(*shape: int) -> torch.Tensor:
    return (torch.randn(shape) * 50).clamp(-448, 448).to(FP8)


def spread(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]


@pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 128), (5, 200, 320), (17, 576, 576)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_block_scales(m, n, k, has_bias):
    a, a_scales = per_token_group_fp8_quant(torch.randn(m, k))
    b, b_scales = per_block_cast_to_fp8(torch.randn(n, k))
    bias = torch.randn(n) if has_bias else None
    given = ops.cutlass_scaled_mm(a, b.t(), a_scales, b_scales.t(), torch.bfloat16, bias)
    wide_a = a.double() * a_scales.double().repeat_interleave(128, 1)[:, :k]
    expected = wide_a @ (b.double() * spread(b_scales.double(), n, k)).T
    expected = expected if bias is None else expected + bias
    assert given.dtype == torch.bfloat16
    torch.testing.assert_close(given.double(), expected, rtol=2**-8, atol=1e-2)


@pytest.mark.parametrize(
    ("scale_a", "scale_b"), [((), ()), ((1,), (1,)), ((6, 1), (1, 40)), ((6, 1), ()), ((), (40,))]
)
def test_plain_scales(scale_a, scale_b):
    a, b = fp8(6, 64), fp8(40, 64)
    sa, sb = torch.rand(scale_a) + 0.1, torch.rand(scale_b) + 0.1
    bias = torch.randn(40)
    given = ops.cutlass_scaled_mm(a, b.t(), sa, sb, torch.float16, bias)
    wide = a.double() * sa.double().reshape(-1, 1), b.double() * sb.double().reshape(-1, 1)
    expected = wide[0] @ wide[1].T + bias
    torch.testing.assert_close(given.double(), expected, rtol=2**-10, atol=1e-2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"a": torch.zeros(2, 64)}, "a"),
        ({"b": torch.zeros(8, 64).to(FP8)}, "b"),
        ({"scale_a": torch.ones(3)}, "scale_a"),
        ({"scale_b": torch.ones(7, 7)}, "scale_b"),
        ({"out_dtype": torch.float32}, "out_dtype"),
    ],
)
def test_wrong_arguments_are_named(change, named):
    given = {
        "a": fp8(2, 64),
        "b": fp8(8, 64).t(),
        "scale_a": torch.ones(()),
        "scale_b": torch.ones(()),
        "out_dtype": torch.bfloat16,
    } | change
    with pytest.raises(ValueError, match=named):
        ops.cutlass_scaled_mm(**given)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 32), (5, 40, 96), (130, 136, 64)])
def test_nvfp4(m, n, k):
    g_a, g_b = torch.tensor([300.0]), torch.tensor([500.0])
    a, a_scales = ops.scaled_fp4_quant(torch.randn(m, k), g_a)
    b, b_scales = nvfp4_quantize(torch.randn(n, k), g_b, True)
    alpha = 1 / (g_a * g_b)
    given = ops.cutlass_scaled_fp4_mm(a, b, a_scales, b_scales, alpha, torch.bfloat16)
    wide_a = nvfp4_dequantize(a, unswizzle_scales(a_scales, m, k // 16), g_a)
    wide_b = nvfp4_dequantize(b, unswizzle_scales(b_scales, n, k // 16), g_b)
    expected = wide_a.double() @ wide_b.double().T
    torch.testing.assert_close(given.double(), expected, rtol=2**-7, atol=1e-2)


def test_fp4_matrices_of_other_widths_are_refused():
    scales = swizzle_scales(torch.ones(1, 2).to(FP8))
    with pytest.raises(ValueError, match="a, b"):
        ops.cutlass_scaled_fp4_mm(
            torch.zeros(1, 16, dtype=torch.uint8),
            torch.zeros(1, 8, dtype=torch.uint8),
            scales,
            scales,
            torch.ones(1),
            torch.bfloat16,
        )


def test_the_ops_can_be_traced_without_data():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        a, b = torch.empty(3, 256, dtype=FP8), torch.empty(512, 256, dtype=FP8)
        y = ops.cutlass_scaled_mm(
            a, b.t(), torch.empty(3, 2), torch.empty(2, 4), torch.bfloat16, torch.empty(512)
        )
    assert y.shape == (3, 512) and y.dtype == torch.bfloat16
