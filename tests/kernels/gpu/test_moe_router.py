"""The Triton router against plain torch."""

import pytest
import torch
from triton_device import DEVICE, IS_INTERPRETED, MARKS

from vllm.kernels.triton import moe_router as kernels
from vllm.model_executor.layers.fused_moe.router import route

pytestmark = MARKS
ROUTERS = {
    "softmax": (128, 8, {}),
    "not renormalised": (60, 4, {"renormalise": False}),
    "sigmoid": (100, 6, {"is_sigmoid": True, "factor": 2.5}),
    "groups": (64, 6, {"num_groups": 8, "kept_groups": 3}),
    "groups with bias": (256, 8, {"is_sigmoid": True, "num_groups": 8, "kept_groups": 4}),
    "one expert": (1, 1, {}),
}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


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


@pytest.mark.skipif(IS_INTERPRETED, reason="CUDA graphs need a GPU")
def test_a_captured_graph_routes_other_tokens():
    logits = torch.randn(64, 128, device=DEVICE).bfloat16()
    kernels.route(logits, 8, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights, ids = kernels.route(logits, 8, True)
    for _ in range(20):
        logits.normal_()
        graph.replay()
        wanted, expected = kernels.route(logits, 8, True)
        assert torch.equal(ids, expected) and torch.equal(weights, wanted)
