"""Products of few tokens with weights in half precision, in Triton, against float64."""

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, MARKS, needs_gpu

from vllm.kernels.triton.skinny import product

pytestmark = MARKS
# rows, columns: gates of a delta-net, routers, what fills no block, and one that is large.
SIZES = [(64, 2048), (96, 4096), (1, 16), (37, 1040), (32, 2880), (8, 8192), (140, 8000)]
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def operands(num_tokens: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x is a view, with NaN beside it: its rows lie apart."""
    x = torch.full((num_tokens + 1, k + 16), float("nan"), device=DEVICE, dtype=dtype)
    x[:num_tokens, :k] = torch.randn(num_tokens, k, device=DEVICE)
    return x[:num_tokens, :k], torch.randn(n, k, device=DEVICE).to(dtype)


def in_memory_of_nan(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    torch.use_deterministic_algorithms(True)
    try:
        return product(x, weight, bias)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 16])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_products_are_rounded_once(size, num_tokens, dtype, with_bias):
    x, weight = operands(num_tokens, *size, dtype)
    # Larger than the products: a sum that is rounded before it is added to would be far off.
    bias = 100 * torch.randn(size[0], device=DEVICE) if with_bias else None
    found = in_memory_of_nan(x, weight, bias)
    assert (found.dtype, found.shape) == (dtype, (num_tokens, size[0]))
    exact = x.double() @ weight.double().T
    # Of sums in float32 that cancel, what the summands lost is left.
    lost = x.double().abs() @ weight.double().abs().T * 2**-21
    if bias is not None:
        exact, lost = exact + bias.double(), lost + bias.double().abs() * 2**-21
    assert bool(((found.double() - exact).abs() <= ROUNDING[dtype] * exact.abs() + lost).all())


@pytest.mark.parametrize("n", [64, 520])
def test_a_token_has_one_result_in_any_company(n):
    x, weight = operands(16, n, 2048, torch.bfloat16)
    bias = torch.randn(n, device=DEVICE)
    whole = product(x, weight, bias)
    for rows in (slice(0, 1), slice(5, 6), slice(3, 12)):
        assert torch.equal(product(x[rows], weight, bias), whole[rows])


@needs_gpu
def test_a_captured_graph_multiplies_other_tokens():
    x, weight = operands(16, 64, 2048, torch.bfloat16)
    product(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = product(x, weight)
    for _ in range(20):
        x.normal_()
        graph.replay()
        assert torch.equal(found, product(x, weight))
