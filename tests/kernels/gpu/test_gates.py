"""Gates of heads in Triton against their definitions in float64."""

import pytest
import torch
from triton_device import DEVICE, MARKS

from vllm.kernels.triton import gates

pytestmark = MARKS
# tokens, heads, columns of a head
SIZES = [(1, 32, 128), (5, 4, 20), (17, 3, 256), (0, 2, 64), (3, 1, 2048), (65, 3, 1000)]
# The interpreter rounds to bfloat16 by cutting off: twice the error.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 7e-4}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape and bool(found.isfinite().all())
    tolerance = TOLERANCES[found.dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_head_is_normed_and_multiplied_by_the_silu_of_its_gate(size, dtype):
    num_tokens, heads, dim = size
    x = random(*size, dtype=dtype)
    # A part of a wider projection, as the layer gives it.
    z = random(num_tokens, heads * dim + 7, dtype=dtype)[:, 3:-4].unflatten(1, (heads, dim))
    weight = random(dim)
    out = torch.full_like(x, float("nan"))
    assert gates.rms_norm_gated(x, z, weight, 1e-6, out) is out
    wide, gate = x.double(), z.double()
    norm = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    assert_close(out, norm * gate * torch.sigmoid(gate))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("is_one", [False, True], ids=["a gate each", "one gate"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_head_is_multiplied_by_the_sigmoid_of_its_gate(size, is_one, dtype):
    num_tokens, heads, dim = size
    x = random(*size, dtype=dtype)
    # Gates lie between the queries that they belong to.
    gate = random(num_tokens, 2 * heads, 1 if is_one else dim, dtype=dtype)[:, 1::2]
    wanted = x.double() * torch.sigmoid(gate.double())
    gates.mul_sigmoid(x, gate)
    assert_close(x, wanted)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("size", [(1, 128), (5, 20), (0, 64), (65, 3000)], ids=str)
def test_columns_are_multiplied_by_the_gelu_of_their_gates(size, approximate, dtype):
    num_tokens, n = size
    x = random(num_tokens, 2 * n + 5, dtype=dtype)[:, 2:-3]
    gate, up = x.double().chunk(2, -1)
    wanted = torch.nn.functional.gelu(gate, approximate=approximate) * up
    assert_close(gates.gelu_and_mul(x, approximate), wanted)
