"""Products of few tokens with an NVFP4 weight as it is stored, in Triton, against float64."""

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, IS_INTERPRETED, MARKS, needs_gpu

from vllm.formats.weight_format import WeightFormat
from vllm.kernels.backends import skinny
from vllm.kernels.interface import LinearTensors
from vllm.kernels.numerics import random_tensors
from vllm.kernels.select.problem import LinearProblem
from vllm.kernels.triton.nvfp4_skinny import nvfp4_product
from vllm.ops.nvfp4 import e2m1_decode, pack_e2m1, unpack_e2m1

pytestmark = [
    *MARKS,
    pytest.mark.skipif(
        not IS_INTERPRETED
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability() < (8, 9),
        reason="Triton reads E4M3 from 8.9 on",
    ),
]
# rows, columns: whole steps and partial ones, more programs than one, one group of columns.
SIZES = [(64, 512), (96, 272), (1, 16), (37, 1040), *(() if IS_INTERPRETED else ((4096, 4096),))]
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
TOKENS = (0, 1, 3, 16)


def layer(*parts: int, k: int, has_bias: bool = False) -> LinearTensors:
    weight = WeightFormat("nvfp4")
    problem = LinearProblem(sum(parts), k, weight, parts=parts, bias=has_bias)
    return random_tensors(problem, torch.device(DEVICE))


def tokens(num_tokens: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A view, with NaN beside it: its rows lie apart."""
    x = torch.full((num_tokens + 1, k + 16), float("nan"), device=DEVICE, dtype=dtype)
    x[:num_tokens, :k] = torch.randn(num_tokens, k, device=DEVICE)
    return x[:num_tokens, :k]


def exact_weight(tensors: LinearTensors) -> Tensor:
    values = e2m1_decode(unpack_e2m1(tensors.weight)).double()
    scales = tensors.scales.double().repeat_interleave(16, 1)
    rows = torch.tensor(tensors.shard_rows, device=values.device)
    return values * scales * tensors.global_scales.double().repeat_interleave(rows)[:, None]


def product(tensors: LinearTensors, x: Tensor) -> Tensor:
    return skinny.linear(LinearProblem(1, 1, tensors.format), tensors, None)(x)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_rounded_once(size, num_tokens, dtype):
    n, k = size
    tensors, x = layer(n, k=k, has_bias=num_tokens == 3), tokens(num_tokens, k, dtype)
    found = product(tensors, x)
    assert (found.dtype, found.shape) == (dtype, (num_tokens, n))
    weight = exact_weight(tensors)
    bias = 0 if tensors.bias is None else tensors.bias.double()
    exact = x.double() @ weight.T + bias
    # Of sums in float32 that cancel, what the summands lost is left.
    lost = (
        x.double().abs() @ weight.abs().T + (0 if tensors.bias is None else bias.abs())
    ) * 2**-20
    assert bool(((found.double() - exact).abs() <= ROUNDING[dtype] * exact.abs() + lost).all())


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_every_code_and_every_scale_is_exact(dtype):
    """A row for each E4M3 scale, with a column for each code, by tokens with a single 1."""
    scales = torch.arange(127, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    codes = torch.arange(16, dtype=torch.uint8, device=DEVICE).expand(127, 16)
    weight, one = pack_e2m1(codes).contiguous(), torch.ones(127, device=DEVICE)
    x = torch.eye(16, device=DEVICE, dtype=dtype)
    found = nvfp4_product(x, weight, scales.reshape(127, 1), one, None)
    expected = e2m1_decode(codes) * scales.float()[:, None]
    assert torch.equal(found.float(), expected.T.to(dtype).float())


def test_parts_of_a_merged_weight_have_their_own_global_scales():
    tensors, x = layer(64, 16, 48, k=512), tokens(5, 512)
    tensors.global_scales = tensors.global_scales * torch.tensor([1.0, 64.0, 1 / 64], device=DEVICE)
    found, exact = product(tensors, x).double(), x.double() @ exact_weight(tensors).T
    parts = (one.split(tensors.shard_rows, 1) for one in (found, exact))
    for own, wanted in zip(*parts, strict=True):
        assert float((own - wanted).norm() / wanted.norm()) < 4e-3


def test_a_token_has_one_result_in_any_company():
    tensors, x = layer(64, k=1040), tokens(16, 1040)
    whole = product(tensors, x)
    for rows in (slice(0, 1), slice(5, 6), slice(3, 12)):
        assert torch.equal(product(tensors, x[rows]), whole[rows])


@needs_gpu
def test_a_captured_graph_multiplies_other_tokens():
    tensors, x = layer(64, k=2048), tokens(16, 2048)
    product(tensors, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = product(tensors, x)
    for _ in range(20):
        x.normal_()
        graph.replay()
        assert torch.equal(found, product(tensors, x))
