"""humming-kernels behind the selector on a GPU: every format within its benchmark's tolerance, in
graphs, and in no more memory than the checkpoint. Needs the library and nvcc."""

from itertools import product

import pytest
import torch
from weight_only_cases import make_linear, wide_of

from vllm.formats.scales import Scales
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import LinearProblem
from vllm.ops.scale_rounding import requantised
from vllm.platforms.libraries import library_state
from vllm.utils.torch_utils import SHORT_NAMES

pytestmark = pytest.mark.gpu
FORMATS = ("fp8-tensor", "fp8-channel", "fp8-block", "nvfp4", "int4-group[32]", "int4-group[128]")
SIZES = [((128,), 128), ((640,), 1152), ((512, 128, 128), 1024), ((4096,), 4096)]
NUM_TOKENS = (1, 2, 8, 16, 17, 64, 100, 128, 513, 2048)
TAKEN = [*product(FORMATS, (torch.bfloat16, torch.float16)), ("mxfp4", torch.bfloat16)]
MAX_ERROR = 5e-3  # as of benchmarks/kernels/bench_weight_only.py


@pytest.fixture(scope="module", autouse=True)
def library():
    found = library_state("humming") if torch.cuda.is_available() else None
    if found is None or found.broken:
        pytest.skip(f"needs a GPU and humming-kernels: {found}")


def made(name, shards, k, dtype=torch.bfloat16, bias=False):
    """(kernel, weight float64 [N, K] as the kernel rounds it, bias)"""
    tensors, _ = make_linear(name, shards, k, device="cuda")
    tensors.bias = torch.randn(sum(shards), device="cuda") if bias else None
    form = {"fp8-block": Scales.FLOAT32, "mxfp4": ""}.get(name, Scales.ACTIVATION)
    problem = LinearProblem(
        sum(shards), k, WeightFormat.parse(name), dtype=SHORT_NAMES[dtype], bias=bias
    )
    winner = Candidate("humming", None, scales=form)
    wide = wide_of(requantised(tensors, form, dtype)).double()
    return registry.backend("humming").linear(problem, tensors, winner), wide, tensors.bias


@pytest.mark.parametrize(("name", "dtype"), TAKEN, ids=str)
@pytest.mark.parametrize(("shards", "k"), SIZES, ids=str)
def test_products_are_within_the_tolerance_for_any_number_of_tokens(name, shards, k, dtype):
    apply, wide, _ = made(name, shards, k, dtype)
    for m in NUM_TOKENS:
        x = torch.randn(m, k, device="cuda").to(dtype)
        expected = x.double() @ wide.T
        assert (apply(x).double() - expected).norm() < MAX_ERROR * expected.norm(), m


@pytest.mark.parametrize("name", FORMATS)
def test_a_bias_is_added_and_no_tokens_are_nothing_to_do(name):
    apply, wide, bias = made(name, (256,), 512, bias=True)
    x = torch.randn(5, 512, device="cuda").bfloat16()
    expected = x.double() @ wide.T + bias.double()
    assert (apply(x).double() - expected).norm() < MAX_ERROR * expected.norm()
    assert apply(x[:0]).shape == (0, 256)


@pytest.mark.parametrize("name", FORMATS)
def test_it_is_captured_in_a_graph_and_compiles_nothing_after_the_first_call(name):
    apply, wide, _ = made(name, (384,), 512)
    apply(torch.zeros(1, 512, device="cuda").bfloat16())
    for m in (3, 300):
        x = torch.randn(m, 512, device="cuda").bfloat16()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = apply(x * 2)
        x.copy_(torch.randn_like(x))
        graph.replay()
        expected = (2 * x.double()) @ wide.T
        assert (y.double() - expected).norm() < MAX_ERROR * expected.norm()


def test_rows_may_be_apart():
    apply, wide, _ = made("nvfp4", (256,), 512)
    x = torch.randn(7, 1024, device="cuda").bfloat16()[:, :512]
    expected = x.double() @ wide.T
    assert (apply(x).double() - expected).norm() < MAX_ERROR * expected.norm()


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_takes_no_more_memory_than_the_checkpoint_while_it_is_laid_out(name):
    tensors, _ = make_linear(name, (4096,), 4096, device="cuda")
    problem = LinearProblem(4096, 4096, WeightFormat.parse(name))
    form = Scales.FLOAT32 if name == "fp8-block" else Scales.ACTIVATION
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kernel = registry.backend("humming").linear(
        problem, tensors, Candidate("humming", None, scales=form)
    )
    stored = sum(part.nbytes for part in (tensors.weight, tensors.scales) if part is not None)
    assert kernel is not None
    assert torch.cuda.memory_allocated() - before <= 1.1 * stored + (1 << 20)
    assert torch.cuda.max_memory_allocated() - before <= 4 * stored + (1 << 20)
