"""NVFP4 experts of the CUTLASS backend on Blackwell, and in Triton's interpreter the sorting of
their rows over the references of the native ops. Not run on hardware."""

from itertools import pairwise

import pytest
import torch
from nvfp4_experts import REFUSALS, expected, experts, kernel_of, operands, relative_error
from torch import Tensor
from triton_device import DEVICE, IS_INTERPRETED, MARKS, needs_gpu

from vllm.kernels.backends.cutlass import Nvfp4Moe

pytestmark = MARKS
ROUTINGS = ("even", "one expert", "other ranks")
COUNT, TOP_K, HIDDEN, INNER = 5, 2, 96, 160


@pytest.fixture(autouse=True)
def on_device():
    if not IS_INTERPRETED and torch.cuda.get_device_capability()[0] not in (10, 12):
        pytest.skip("needs a GPU of capability family 100 or 120")
    torch.manual_seed(0)
    with torch.device(DEVICE):
        yield


def routed(num_tokens: int, routing: str) -> tuple[Tensor, Tensor, Tensor]:
    """x, weights and ids of tokens."""
    odds = torch.rand(num_tokens, COUNT)
    odds[:, 2] += 2 * (routing == "one expert")
    ids = odds.topk(TOP_K, 1).indices
    if routing == "other ranks":
        ids[torch.rand(ids.shape) < 0.5] = -1
    return torch.randn(num_tokens, HIDDEN).bfloat16(), torch.rand(ids.shape), ids


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("num_tokens", [1, 8, 37])
def test_rows_sorted_in_triton_give_the_sums_of_experts(num_tokens: int, routing: str):
    for is_shared in (True, False):
        tensors = experts(COUNT, HIDDEN, INNER, is_shared)
        inputs = routed(num_tokens, routing)
        torch.use_deterministic_algorithms(True)  # fills what torch.empty gives
        try:
            y = Nvfp4Moe.of(tensors).unadded(*inputs).total()
        finally:
            torch.use_deterministic_algorithms(False)
        wanted, is_here = expected(tensors, *inputs), (inputs[2] >= 0).any(1)
        assert bool((y[~is_here] == 0).all())
        assert bool(y.isfinite().all())
        if is_here.any():
            assert relative_error(y, wanted) < 0.005


@needs_gpu
@pytest.mark.parametrize("num_tokens", [1, 64, 700])
def test_a_captured_graph_serves_other_tokens_and_other_experts(num_tokens: int):
    kernel = kernel_of(experts(COUNT, HIDDEN, INNER), TOP_K)
    held = routed(num_tokens, "even")
    kernel(*held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel(*held)
    for routing in ROUTINGS:
        for mine, other in zip(held, routed(num_tokens, routing), strict=True):
            mine.copy_(other)
        graph.replay()
        assert torch.equal(y, kernel(*held)), routing


# ---------------------------------------------------------------- the op


@needs_gpu
@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize(("n", "k"), [(128, 256), (136, 288), (1024, 2048), (40, 32)])
@pytest.mark.parametrize(
    "counts", [[1], [0, 3, 0, 64, 0], [130, 0, 257, 1], [0] * 40 + [2] * 30 + [0]], ids=len
)
def test_products_are_those_of_the_reference(counts, n, k, num_parts):
    given = operands(counts, n, k, num_parts)
    torch.ops.vllm.cutlass_nvfp4_gemm_grouped(*given.values())
    on_cpu = {name: tensor.cpu() for name, tensor in given.items()}
    on_cpu["out"] = torch.full_like(on_cpu["out"], float("nan"))
    torch.ops.vllm.cutlass_nvfp4_gemm_grouped(*on_cpu.values())
    torch.testing.assert_close(
        given["out"].cpu(), on_cpu["out"], rtol=2**-7, atol=1e-3, equal_nan=True
    )
    for begin, end in pairwise(on_cpu["offsets"].tolist()):
        assert bool(given["out"][begin:end].isfinite().all())


@needs_gpu
@pytest.mark.parametrize(("name", "change", "message"), REFUSALS)
def test_what_cannot_be_served_is_refused_by_name(name, change, message):
    given = operands([3, 5], 40, 64, 2)
    torch.ops.vllm.cutlass_nvfp4_gemm_grouped(*given.values())
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=message):
        torch.ops.vllm.cutlass_nvfp4_gemm_grouped(*given.values())
