"""The Triton router, the sorting of rows by expert and their quantisation, against plain torch.

TRITON_INTERPRET=1 runs the same kernels on the CPU; its conversion to E4M3 is wrong where rounding
carries into the exponent, so values are compared on a GPU alone.
"""

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from vllm.kernels.problem import MoEProblem, WeightFormat
from vllm.kernels.spec import Scales
from vllm.kernels.tensors import MoETensors
from vllm.kernels.triton import moe_rows as kernels
from vllm.kernels.triton.moe import Experts
from vllm.model_executor.layers.fused_moe.router import route
from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
from vllm.utils.deep_gemm import pack_ue8m0

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU"),
]
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


# ---------------------------------------------------------------- router


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


# ---------------------------------------------------------------- sorting


@pytest.mark.parametrize("layout", ["dense", "aligned", "masked"])
@pytest.mark.parametrize("num_tokens", [1, 37, 700])
def test_every_pair_gets_a_row_of_its_expert(layout: str, num_tokens: int):
    count, top_k, block = 7, 3, 16
    ids = torch.randint(-1, count + 1, (num_tokens, top_k), device=DEVICE)
    stride = num_tokens + 2
    options = {
        "dense": {"block_m": block},
        "aligned": {"block_m": block, "is_aligned": True},
        "masked": {"rows_per_expert": stride},
    }[layout]
    rows = kernels.sort(ids, count, **options)
    is_here = (ids >= 0) & (ids < count)
    assert bool((rows.positions[~is_here] == -1).all())
    places = rows.positions[is_here].long()
    assert len(places.unique()) == len(places)
    pairs = torch.arange(ids.numel(), device=DEVICE).view(ids.shape)[is_here]
    assert torch.equal(rows.order[places].long(), pairs)
    counts = torch.bincount(ids[is_here], minlength=count)
    if layout == "masked":
        assert torch.equal(rows.ends[1:].long(), counts)
        assert torch.equal(places // stride, ids[is_here])
        return
    experts, firsts, ends = rows.blocks.tolist()
    found = torch.full((int(rows.order.numel()),), -1)
    for expert, first, end in zip(experts, firsts, ends, strict=True):
        if expert >= 0:
            found[first : min(first + block, end)] = expert
    assert torch.equal(found[places.cpu()], ids[is_here].cpu())
    assert int((found >= 0).sum()) == len(places)
    if layout == "dense":
        assert rows.ends.tolist() == [0, *counts.cumsum(0).tolist()]
    else:
        assert torch.equal(rows.expert_of_row.cpu().long(), found)


# ---------------------------------------------------------------- quantised rows


def quantised(x: Tensor, form: Scales) -> tuple[Tensor, Tensor]:
    q, scales = per_token_group_quant_fp8(x, 128, use_ue8m0=form != Scales.FLOAT32)
    return q, pack_ue8m0(scales) if form == Scales.UE8M0 else scales


def assert_rows(q: Tensor, scales: Tensor, wanted: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(scales, wanted[1])
    if not IS_INTERPRETED:
        codes, expected = q.view(torch.uint8), wanted[0].view(torch.uint8)
        assert torch.equal(codes, expected)


@pytest.mark.parametrize("form", list(Scales))
@pytest.mark.parametrize("stride", [0, 12])
def test_rows_hold_their_tokens_quantised(form: Scales, stride: int):
    count, k = 5, 640
    ids = torch.randint(-1, count, (9, 2), device=DEVICE)
    x = torch.randn(9, k, device=DEVICE) * torch.logspace(-3, 2, k, device=DEVICE)
    x[0] = 0
    rows = kernels.sort(ids, count, rows_per_expert=stride)
    layout = kernels.Rows(count * stride or ids.numel(), stride, form)
    q, scales = kernels.spread(x, rows.positions, layout)
    assert scales.shape[:-1] == ((count, stride) if stride else (ids.numel(),))
    tokens, _ = torch.where(rows.positions >= 0)
    places = rows.positions[rows.positions >= 0].long()
    wanted = quantised(x[tokens], form)
    assert_rows(q[places], scales.reshape(-1, scales.shape[-1])[places], wanted)


def test_between_the_products_rows_are_activated():
    ids = torch.randint(0, 5, (9, 2), device=DEVICE)
    rows = kernels.sort(ids, 5)
    gate, up = torch.randn(2, 18, 256, device=DEVICE)
    inner = torch.cat((gate, up), 1)
    q, scales = kernels.activate(inner, rows.positions, kernels.Rows(18))
    wanted = quantised(torch.nn.functional.silu(gate) * up, Scales.FLOAT32)
    torch.testing.assert_close(scales, wanted[1], rtol=1e-5, atol=0)
    if not IS_INTERPRETED:
        held = q.float().view(18, 2, 128) * scales[..., None]
        exact = (torch.nn.functional.silu(gate) * up).view(18, 2, 128)
        assert (held - exact).norm() < 0.03 * exact.norm()


def test_sums_leave_out_the_experts_of_other_ranks():
    ids = torch.tensor([[0, 3], [-1, 1], [-1, -1]], device=DEVICE)
    weights = torch.tensor([[0.5, 0.25], [9.0, 2.0], [9.0, 9.0]], device=DEVICE)
    rows = kernels.sort(ids, 4)
    values = torch.full((6, 80), float("nan"), device=DEVICE)
    places = rows.positions[rows.positions >= 0].long()
    values[places] = torch.randn(3, 80, device=DEVICE)
    y = kernels.combine(values, weights, rows.positions, 4)
    first, second, third = values[places]
    wanted = torch.stack((0.5 * first + 0.25 * second, 2 * third, torch.zeros_like(first)))
    torch.testing.assert_close(y, wanted)


def test_pairs_that_arrive_one_by_one_are_computed_as_those_of_whole_tokens():
    gate_up, down = torch.randn(4, 64, 64), torch.randn(4, 64, 32)
    weights = (stack.to(DEVICE, torch.float16) for stack in (gate_up, down))
    stored = WeightFormat("fp16")
    experts = Experts(MoEProblem(4, 2, 64, 32, stored, dtype="fp16"), MoETensors(stored, *weights))
    x = torch.randn(5, 64, device=DEVICE, dtype=torch.float16)
    ids = torch.stack([torch.randperm(4, device=DEVICE)[:2] for _ in range(5)])
    plan = next(plan for _, plan in experts.plans if plan.sorts)
    together, places = experts.pair_rows(x, ids, plan)
    apart, own_places = experts.pair_rows(x.repeat_interleave(2, 0), ids.view(-1, 1), plan)
    assert torch.equal(apart[own_places.flatten()], together[places.flatten()])
