"""Norms, rotary embedding and the SiLU gate against torch, and row by row against themselves."""

import pytest
import torch
from torch import Tensor

from vllm.ops import cpu_ops, torch_ops

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DIMS = (1, 8, 100, 576, 1537)


def assert_close(given: Tensor, expected: Tensor) -> None:
    eps = torch.finfo(given.dtype).eps
    torch.testing.assert_close(given, expected, atol=1e-6, rtol=8 * eps)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("num_tokens", (0, 1, 65))
def test_rms_norm_equals_the_reference(isa, num_tokens, dim, dtype):
    x, weight = torch.randn(num_tokens, dim).to(dtype), torch.randn(dim)
    out = torch.full_like(x, float("nan"))
    assert cpu_ops.rms_norm(x, weight, 1e-5, out) is out
    assert_close(out, torch_ops.rms_norm(x, weight, 1e-5))
    assert torch.equal(cpu_ops.rms_norm(x, weight, 1e-5, out=x), out)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_rms_norm_of_heads_inside_wider_rows(isa, dtype):
    qkv, weight = torch.randn(40, 15, 64).to(dtype), torch.randn(64)
    before = qkv.clone()
    heads = qkv[:, 9:12]
    expected = torch_ops.rms_norm(heads, weight, 1e-6)
    cpu_ops.rms_norm(heads, weight, 1e-6, out=heads)
    assert_close(heads, expected)
    assert torch.equal(qkv[:, :9], before[:, :9]) and torch.equal(qkv[:, 12:], before[:, 12:])


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("num_tokens", (1, 65))
def test_fused_add_rms_norm_equals_add_then_norm(isa, num_tokens, dim, dtype):
    x, residual = torch.randn(2, num_tokens, dim).to(dtype)
    weight = torch.randn(dim)
    total = x + residual
    normed = cpu_ops.rms_norm(total, weight, 1e-5)
    cpu_ops.fused_add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(x, normed)


@pytest.mark.parametrize("is_neox", (True, False))
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("head_dim,rotary_dim", ((64, 64), (80, 32), (128, 100), (8, 2)))
def test_rotary_embedding_equals_the_reference(isa, head_dim, rotary_dim, dtype, is_neox):
    cos_sin = torch.randn(50, rotary_dim)
    positions = torch.randint(0, 50, (33,))
    qkv = torch.randn(33, 15, head_dim).to(dtype)
    expected = qkv.clone()
    cpu_ops.rotary_embedding(positions, qkv[:, :9], qkv[:, 9:12], cos_sin, is_neox)
    torch_ops.rotary_embedding(positions, expected[:, :9], expected[:, 9:12], cos_sin, is_neox)
    assert torch.equal(qkv, expected)


def test_rotary_embedding_preserves_the_length_of_each_pair(isa):
    angle = torch.randn(10, 32)
    cos_sin = torch.cat((angle.cos(), angle.sin()), 1)
    query = torch.randn(10, 4, 64)
    before = query.clone()
    cpu_ops.rotary_embedding(torch.arange(10), query, None, cos_sin)
    lengths = [torch.hypot(*x.chunk(2, -1)) for x in (before, query)]
    torch.testing.assert_close(*lengths)
    assert not torch.equal(before, query)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens,dim", ((0, 8), (1, 1536), (3, 33), (65, 1536)))
def test_silu_and_mul_equals_the_reference(isa, num_tokens, dim, dtype):
    x = (torch.randn(num_tokens, 2 * dim) * 5).to(dtype)
    assert_close(cpu_ops.silu_and_mul(x), torch_ops.silu_and_mul(x))


@pytest.mark.parametrize("approximate", ("none", "tanh"))
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens,dim", ((0, 8), (1, 1536), (3, 33), (65, 1536)))
def test_gelu_and_mul_equals_the_reference(isa, num_tokens, dim, dtype, approximate):
    x = (torch.randn(num_tokens, 2 * dim) * 5).to(dtype)
    given = cpu_ops.gelu_and_mul(x, approximate)
    expected = torch_ops.gelu_and_mul(x, approximate)
    # The approximation of the tail is right to 1.5e-7 of the gate; up is up to about 20.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(given, expected, atol=max(2e-5, eps), rtol=4 * eps)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("num_rows,dim", ((0, 8), (1, 1537), (5, 33)))
def test_soft_cap_equals_the_reference(isa, num_rows, dim, dtype):
    given = (torch.randn(num_rows, dim + 3) * 40).to(dtype)
    expected = given.clone()
    cpu_ops.soft_cap(given[:, 1:-2], 30.0)
    torch_ops.soft_cap(expected[:, 1:-2], 30.0)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(given, expected, atol=max(1e-5, eps), rtol=2 * eps)


def test_the_exponential_is_accurate_over_its_whole_range(isa):
    gate = torch.cat((torch.linspace(-85, 85, 200_001), torch.linspace(-1, 1, 100_001)))
    out = cpu_ops.silu_and_mul(torch.stack((gate, torch.ones_like(gate))).view(1, -1))[0]
    exact = torch.nn.functional.silu(gate.double())
    error = (out.double() - exact).abs() / exact.abs().clamp_min(1e-37)
    assert error.max() < 3.5 * 2.0**-24 * 2


def test_saturated_gates_are_zero_or_identity(isa):
    gate = torch.tensor([-1e4, -200.0, -100.0, 0.0, 100.0, 1e4, float("nan")])
    out = cpu_ops.silu_and_mul(torch.cat((gate, torch.ones(7))).view(1, -1))[0]
    torch.testing.assert_close(out[:3], torch.zeros(3), atol=1e-30, rtol=0)
    assert torch.equal(out[3:6], gate[3:6])
    assert out[6].isnan()


def test_a_row_has_the_same_bits_in_every_batch(isa):
    x = torch.randn(200, 1152)
    weight, cos_sin = torch.randn(1152), torch.randn(300, 64)
    positions = torch.arange(200)

    def all_layers(rows: slice) -> list[Tensor]:
        part = x[rows]
        fused, residual, rotated = part.clone(), part * 0.5, part.clone().view(-1, 18, 64)
        cpu_ops.fused_add_rms_norm(fused, residual, weight, 1e-5)
        cpu_ops.rotary_embedding(positions[rows], rotated, None, cos_sin)
        return [
            cpu_ops.rms_norm(part, weight, 1e-5),
            cpu_ops.silu_and_mul(part),
            fused,
            residual,
            rotated,
        ]

    whole = all_layers(slice(0, 200))
    for m in (*range(1, 41), 129):
        for result, expected in zip(all_layers(slice(7, 7 + m)), whole, strict=True):
            assert torch.equal(result, expected[7 : 7 + m])
