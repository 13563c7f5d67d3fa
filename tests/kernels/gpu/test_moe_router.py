"""The Triton router against plain torch: its choice by logits, and together with the product."""

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, IS_INTERPRETED, MARKS

from vllm.architectures.router import Router
from vllm.kernels.activations import KernelByTokens
from vllm.kernels.backends.torch import DenseKernel, with_zeros
from vllm.kernels.triton import moe_router as kernels
from vllm.ops import moe_router as router
from vllm.ops.moe_router import route

pytestmark = MARKS
ROUTERS = {
    "softmax": (128, 8, {}),
    "not renormalised": (60, 4, {"renormalise": False}),
    "sigmoid": (100, 6, {"scoring": "sigmoid", "routed_scale": 2.5}),
    "groups": (64, 6, {"num_groups": 8, "topk_groups": 3}),
    "groups with bias": (256, 8, {"scoring": "sigmoid", "num_groups": 8, "topk_groups": 4}),
    "one expert": (1, 1, {}),
}


# ---------------------------------------------------------------- by logits


@pytest.mark.parametrize("num_tokens", [0, 1, 37])
@pytest.mark.parametrize("name", ROUTERS)
def test_the_router_chooses_as_its_reference(name: str, num_tokens: int):
    count, top_k, options = ROUTERS[name]
    options = {"renormalise": True} | options
    if "bias" in name:
        options["bias"] = torch.randn(count, device=DEVICE)
    # A view: rows of logits may be further apart than their experts. float32 has no ties.
    logits = torch.randn(num_tokens, count + 3, device=DEVICE)[:, :count]
    weights, ids = kernels.route(logits, top_k, **options)
    wanted, chosen = route(logits, top_k, **options)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int64)
    assert torch.equal(ids, chosen)
    torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-7)


def test_of_equal_experts_the_first_are_chosen():
    _, ids = kernels.route(torch.zeros(3, 40, device=DEVICE), 5, True)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 3


def test_logits_that_are_nan_choose_experts_that_exist():
    logits = torch.randn(2, 40, device=DEVICE)
    logits[0] = float("nan")
    weights, ids = kernels.route(logits, 4, True)
    assert bool(((ids >= 0) & (ids < 40)).all())
    assert bool(weights[0].isnan().all()) and bool(weights[1].isfinite().all())


# ---------------------------------------------------------------- with the product


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """In float32, rounded once."""
    return (x.float() @ weight.float().T).to(x.dtype)


def whole_numbers(*shape: int) -> Tensor:
    """Small enough that sums of products are exact in any order, and many of them equal."""
    return torch.randint(-3, 4, shape, device=DEVICE).bfloat16()


def chosen(
    x: Tensor, gate: DenseKernel, top_k: int, renormalise: bool = True, bias=None, **options
) -> tuple[Tensor, Tensor]:
    weights, ids, others = chosen_beside(
        x, gate, len(gate.weight), top_k, renormalise, bias, **options
    )
    assert others.shape == (len(x), 0)
    return weights, ids


def chosen_beside(
    x: Tensor, gate: DenseKernel, count: int, top_k: int, renormalise=True, bias=None, **options
) -> tuple[Tensor, Tensor, Tensor]:
    """Among the first `count` rows of the gate, in memory that holds NaN before it is written."""
    torch.use_deterministic_algorithms(True)
    try:
        routing = Router(count, top_k, renormalise, **options)
        return kernels.choose_experts(x, gate, routing, bias)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("hidden", [512, 1040])
@pytest.mark.parametrize("num_tokens", [0, 1, 37] if IS_INTERPRETED else [0, 1, 16, 37, 128, 129])
@pytest.mark.parametrize("name", [name for name, (count, *_) in ROUTERS.items() if count > 1])
def test_our_product_is_that_of_a_linear_layer(name, num_tokens, hidden):
    count, top_k, options = ROUTERS[name]
    options = {"renormalise": True} | options
    if "bias" in name:
        options["bias"] = torch.randn(count, device=DEVICE)
    x = whole_numbers(num_tokens, hidden + 8)[:, :hidden]  # a view: rows lie apart
    gate = DenseKernel(whole_numbers(count, hidden) / 32, multiply)
    weights, ids = chosen(x, gate, top_k, **options)
    wanted, expected = kernels.route(gate(x), top_k, **options)
    assert torch.equal(ids, expected)
    torch.testing.assert_close(weights, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_others", [1, 3])
@pytest.mark.parametrize("num_tokens", [0, 1, 20, 129])
@pytest.mark.parametrize("count", [60, 256])
def test_rows_beyond_the_experts_are_multiplied_beside_them(count, num_tokens, num_others):
    x = whole_numbers(num_tokens, 1048)[:, :1040]
    gate = DenseKernel(whole_numbers(count + num_others, 1040) / 32, multiply)
    weights, ids, others = chosen_beside(x, gate, count, 4)
    wanted = multiply(x, gate.weight)
    assert others.dtype == x.dtype and torch.equal(others, wanted[:, count:])
    # For kernels that read them, all numbers of tokens are one kind.
    assert others.stride(0) % 16 == 0
    alone, expected = kernels.route(wanted[:, :count], 4, True)
    assert torch.equal(ids, expected)
    torch.testing.assert_close(weights, alone, rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_tokens", [3, 129])
def test_rows_of_zeros_after_the_gate_are_no_experts(num_tokens):
    x, padded = whole_numbers(num_tokens, 512), whole_numbers(64, 512) / 32
    padded[41:] = 0
    wanted = chosen_beside(x, DenseKernel(padded[:41].clone(), multiply), 40, 4)
    found = chosen_beside(x, DenseKernel(padded[:41], multiply, padded), 40, 4)
    assert all(torch.equal(*both) for both in zip(wanted, found, strict=True))


@pytest.mark.parametrize(("num_rows", "wanted"), [(257, 272), (256, None), (151_665, None)])
def test_a_small_weight_with_odd_rows_is_kept_with_rows_of_zeros(num_rows, wanted):
    weight = torch.ones(num_rows, 2, device=DEVICE)
    kept = with_zeros(weight)
    assert (None if kept is None else len(kept)) == wanted
    if kept is not None:
        assert torch.equal(kept[:num_rows], weight) and not kept[num_rows:].any()


def test_rows_beyond_the_experts_of_a_gate_that_keeps_no_weight():
    x, weight = whole_numbers(5, 512), whole_numbers(41, 512)
    for choose in (kernels.choose_experts, router.choose_experts):
        _, ids, others = choose(x, lambda x: multiply(x, weight), Router(40, 4, True))
        assert torch.equal(others, multiply(x, weight[40:])) and int(ids.max()) < 40


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_token_is_routed_alike_in_any_company(dtype):
    x = torch.randn(100, 2048, device=DEVICE).to(dtype)
    gate = DenseKernel((torch.randn(128, 2048, device=DEVICE) / 45).to(dtype), multiply)
    weights, ids = chosen(x, gate, 8)
    for rows in (slice(0, 1), slice(17, 18), slice(40, 60), slice(99, 100)):
        part, own_ids = chosen(x[rows], gate, 8)
        assert torch.equal(own_ids, ids[rows])
        # The interpreter's products are BLAS's, whose order of sums is its own.
        tolerance = 1e-3 if IS_INTERPRETED else 0
        torch.testing.assert_close(part, weights[rows], rtol=tolerance, atol=0)
    exact = torch.softmax(x.double() @ gate.weight.double().T, -1).topk(8, -1).values
    wanted = exact / exact.sum(-1, keepdim=True)
    bound = 4 * torch.finfo(dtype).eps  # logits of up to 4, rounded once
    torch.testing.assert_close(weights.double(), wanted, rtol=bound, atol=0)


def test_a_token_that_is_nan_spoils_no_other():
    x = torch.randn(20, 512, device=DEVICE).bfloat16()
    gate = DenseKernel(torch.randn(40, 512, device=DEVICE).bfloat16() / 16, multiply)
    wanted, expected = chosen(x, gate, 4)
    x[3] = float("nan")
    weights, ids = chosen(x, gate, 4)
    assert bool(((ids >= 0) & (ids < 40)).all()) and bool(weights[3].isnan().all())
    others = torch.arange(20, device=DEVICE) != 3
    assert torch.equal(ids[others], expected[others])
    assert torch.equal(weights[others], wanted[others])


def test_a_gate_that_keeps_no_weight_is_called():
    x, weight = whole_numbers(5, 512), whole_numbers(40, 512)
    gate, routing = lambda x: multiply(x, weight), Router(40, 4, True)
    weights, ids, _ = kernels.choose_experts(x, gate, routing)
    wanted, expected = kernels.route(multiply(x, weight), 4, True)
    assert torch.equal(ids, expected) and torch.equal(weights, wanted)


def test_a_gate_whose_kernel_depends_on_the_number_of_tokens_keeps_its_weight():
    x, gate = whole_numbers(5, 512), DenseKernel(whole_numbers(40, 512), multiply)

    def unread(x: Tensor) -> Tensor:
        raise AssertionError("the router's product was not ours")

    split = KernelByTokens([(8, unread), (None, gate)])
    found, wanted = (kernels.choose_experts(x, g, Router(40, 4, True)) for g in (split, gate))
    assert all(map(torch.equal, found, wanted))


@pytest.mark.skipif(IS_INTERPRETED, reason="CUDA graphs need a GPU")
def test_a_captured_graph_routes_other_tokens():
    x = torch.randn(64, 2048, device=DEVICE).bfloat16()
    gate = DenseKernel(torch.randn(129, 2048, device=DEVICE).bfloat16() / 45, multiply)
    routing = Router(128, 8, True)
    kernels.choose_experts(x, gate, routing)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernels.choose_experts(x, gate, routing)
    for _ in range(20):
        x.normal_()
        graph.replay()
        wanted = kernels.choose_experts(x, gate, routing)
        assert all(map(torch.equal, found, wanted))
