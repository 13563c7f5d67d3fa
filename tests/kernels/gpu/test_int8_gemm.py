"""int8 layers by activations in int8 on a GPU: torch's GEMM, which takes no fewer than 17 rows."""

import pytest
import torch

from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels.backends import scaled_mm
from vllm.kernels.interface import LinearTensors
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import LinearProblem
from vllm.ops import int8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
TOKEN, STATIC = ActScheme.DYNAMIC_TOKEN_INT8, ActScheme.STATIC_TENSOR_INT8


def make(n, k, scheme=TOKEN, has_bias=True, dtype="bf16"):
    torch.manual_seed(0)
    weight_format = WeightFormat.parse("int8-channel")
    tensors = LinearTensors(
        weight_format,
        torch.randint(-128, 128, (n, k), dtype=torch.int8, device="cuda"),
        (n,),
        torch.rand(n, 1, device="cuda") * 1e-3 + 1e-4,
        torch.randn(n, device="cuda") if has_bias else None,
        torch.tensor(0.05, device="cuda"),
    )
    problem = LinearProblem(n, k, weight_format, (scheme, ActScheme.NONE), dtype)
    return tensors, scaled_mm.linear(problem, tensors, Candidate("scaled_mm", scheme))


@pytest.mark.parametrize("m", (0, 1, 7, 16, 17, 33, 200, 1000))
@pytest.mark.parametrize(("n", "k"), [(64, 128), (256, 512), (200, 1016), (4096, 4096)])
@pytest.mark.parametrize("scheme", [TOKEN, STATIC])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_are_those_of_the_rounded_activations(m, n, k, scheme, dtype):
    tensors, kernel = make(n, k, scheme)
    x = torch.randn(m, k, device="cuda").to(dtype)
    y = kernel(x)
    assert y.shape == (m, n) and y.dtype == dtype
    q, scale = int8.quantise(x, tensors.input_scale if scheme is STATIC else None)
    wide = (tensors.weight.double() * tensors.scales.double()).T
    expected = q.double() * scale.double() @ wide + tensors.bias.double()
    assert torch.allclose(y.double(), expected.to(dtype).double(), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("m", (1, 5, 17, 64))
def test_quantised_tokens_are_those_of_the_cpu(m):
    x = torch.randn(m, 512) * torch.logspace(-3, 2, 512)
    q, scales = int8.quantise(x)
    on_gpu, scales_on_gpu = int8.quantise(x.cuda())
    assert torch.equal(on_gpu.cpu(), q) and torch.equal(scales_on_gpu.cpu(), scales)


@pytest.mark.parametrize("m", (1, 17))
def test_a_captured_graph_serves_other_tokens(m):
    _, kernel = make(256, 512)
    held = torch.randn(m, 512, device="cuda").bfloat16()
    kernel(held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel(held)
    held.copy_(torch.randn(m, 512, device="cuda") * 3)
    graph.replay()
    assert torch.equal(y, kernel(held))


def test_a_row_is_the_same_in_any_batch():
    _, kernel = make(256, 512)
    x = torch.randn(40, 512, device="cuda").bfloat16()
    assert all(torch.equal(kernel(x[i : i + 1]), kernel(x)[i : i + 1]) for i in (0, 17, 39))
