"""The sorting of rows by expert in Triton and their quantisation, against plain torch."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, MARKS, needs_gpu

from vllm.formats.act_scheme import ActScheme
from vllm.formats.scales import Scales
from vllm.formats.weight_format import WeightFormat
from vllm.kernels.activations import InputQuant, QuantizedInput
from vllm.kernels.interface import MoETensors
from vllm.kernels.select.problem import MoEProblem
from vllm.kernels.triton import moe_rows as kernels
from vllm.kernels.triton.moe import Experts
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
from vllm.ops import torch_ops
from vllm.ops.fp8_quant import ScaleLayout
from vllm.utils.deep_gemm import pack_ue8m0
from vllm.worker.numerics import _is_broken

pytestmark = MARKS


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
    assert torch.equal(q.view(torch.uint8), wanted[0].view(torch.uint8))


@pytest.mark.parametrize("form", [form for form in Scales if form != Scales.ACTIVATION])
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


@pytest.mark.parametrize("form", [form for form in Scales if form != Scales.ACTIVATION])
@pytest.mark.parametrize("top_k", [None, 2])
def test_no_tokens_have_no_rows(form: Scales, top_k: int | None):
    x = torch.randn(0, 640, device=DEVICE)
    positions = None if top_k is None else torch.empty(0, top_k, dtype=torch.int32, device=DEVICE)
    q, scales = kernels.spread(x, positions, kernels.Rows(0, scales=form))
    wanted = quantised(x, form)
    assert (q.shape, q.dtype) == (wanted[0].shape, wanted[0].dtype)
    assert (scales.shape, scales.dtype) == (wanted[1].shape, wanted[1].dtype)


def test_no_tokens_have_no_rows_of_row_major_scales():
    q, scales = kernels.quantise(torch.randn(0, 640, device=DEVICE))
    assert (q.shape, scales.shape) == ((0, 640), (0, 5))


@pytest.mark.parametrize("stride", [0, 12])
def test_experts_without_a_token_have_rows_of_none(stride: int):
    count, ids = 5, torch.empty(0, 2, dtype=torch.int64, device=DEVICE)
    rows = kernels.sort(ids, count, rows_per_expert=stride, block_m=0 if stride else 16)
    assert rows.ends.tolist() == [0] * (count + 1) and rows.positions.shape == (0, 2)
    layout = kernels.Rows(count * stride, stride)
    inner = torch.randn(count * stride, 512, device=DEVICE)
    q, scales = kernels.activate(inner, rows.positions, layout)
    assert q.shape == (count * stride, 256)
    assert scales.shape == ((count, stride, 2) if stride else (0, 2))
    weights = torch.empty(0, 2, device=DEVICE)
    assert kernels.combine(inner, weights, rows.positions, count).shape == (0, 512)


@pytest.mark.parametrize("is_up_first", [False, True])
def test_between_the_products_rows_are_activated(is_up_first: bool):
    ids = torch.randint(0, 5, (9, 2), device=DEVICE)
    rows = kernels.sort(ids, 5)
    gate, up = torch.randn(2, 18, 256, device=DEVICE)
    inner = torch.cat((up, gate) if is_up_first else (gate, up), 1)
    q, scales = kernels.activate(inner, rows.positions, kernels.Rows(18), is_up_first)
    wanted = quantised(torch.nn.functional.silu(gate) * up, Scales.FLOAT32)
    torch.testing.assert_close(scales, wanted[1], rtol=1e-5, atol=0)
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


QUANTS = [
    InputQuant(ScaleLayout.ROW_MAJOR),
    InputQuant(ScaleLayout.COLUMN_MAJOR, use_ue8m0=True),
    InputQuant(ScaleLayout.TMA_ALIGNED, keeps_source=True),
]


def rows_of_pairs(is_sorted: bool, hidden: int) -> kernels.ExpertRows:
    """Of 5 tokens and 4 experts, some pairs of none; rows of no pair hold NaN."""
    ids = torch.randint(-1, 5, (5, 2), device=DEVICE)
    values = torch.randn(10, hidden, device=DEVICE)
    positions = kernels.sort(ids, 4).positions if is_sorted else ids
    is_here = (ids >= 0) & (ids < 4)
    taken = positions[is_here].long() if is_sorted else is_here.flatten().nonzero().flatten()
    unused = torch.ones(10, dtype=torch.bool, device=DEVICE).index_fill_(0, taken, False)
    values[unused] = float("nan")
    weights = torch.rand(5, 2, device=DEVICE)
    return kernels.ExpertRows(values, weights, positions, 4, is_sorted)


@pytest.mark.parametrize("hidden", [640, 200])
@pytest.mark.parametrize("has_addend", [False, True])
@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("quant", QUANTS, ids=lambda quant: quant.layout.value)
def test_sums_and_the_norm_after_them_in_one_are_those_of_two_launches(
    quant: InputQuant, is_sorted: bool, has_addend: bool, hidden: int
):
    rows, residual = rows_of_pairs(is_sorted, hidden), torch.randn(5, hidden, device=DEVICE)
    if has_addend:
        rows = rows.plus(torch.randn(5, hidden, device=DEVICE))
    weight, total = torch.rand(hidden, device=DEVICE) + 0.5, residual.clone()
    wanted = replace(quant, keeps_source=True).add_rms_norm(rows.total(), total, weight, 1e-6)
    torch.use_deterministic_algorithms(True)  # fills with NaN what is not written
    found = rows.add_rms_norm(residual, weight, 1e-6, quant)
    torch.use_deterministic_algorithms(False)
    assert torch.equal(residual, total) and found.dtype == torch.float32
    torch.testing.assert_close(found.scales, wanted.scales, rtol=1e-5, atol=0)
    assert found.scales.stride() == wanted.scales.stride()
    memory = found.scales.new_empty(0).set_(found.scales.untyped_storage())
    if quant.layout is ScaleLayout.TMA_ALIGNED:
        assert not memory.view(-1, 8)[:, 5:].any()
    assert (found.source is not None) == quant.keeps_source
    if found.source is not None:
        torch.testing.assert_close(found.source, wanted.source)
    spread = found.scales.repeat_interleave(128, 1)[:, :hidden]
    error = found.q.float() * spread - wanted.source
    assert error.norm() < 0.04 * wanted.source.norm()


@pytest.mark.parametrize("layout", [ScaleLayout.ROW_MAJOR, ScaleLayout.PACKED_UE8M0, None])
def test_a_norm_takes_sums_that_are_left_to_it(layout: ScaleLayout | None):
    """In the same launch, but for a reader of packed scales or of floats."""
    rows, first = rows_of_pairs(True, 256), torch.randn(5, 256, device=DEVICE)
    second = first.clone()
    context = SimpleNamespace(ops=torch_ops, decoder=SimpleNamespace(rms_norm_eps=1e-6))
    norm = RMSNorm(context, "norm", 256).to(DEVICE)
    norm.weight.data.fill_(1.5)
    quant = layout and InputQuant(layout)
    reader = SimpleNamespace(input_quant=lambda num_tokens: quant)
    found, wanted = norm.add(rows, first, reader), norm.add(rows.total(), second, reader)
    assert torch.equal(first, second) and type(found) is type(wanted)
    if isinstance(found, QuantizedInput):
        torch.testing.assert_close(found.scales, wanted.scales, rtol=1e-5, atol=0)
    else:
        torch.testing.assert_close(found, wanted)


def test_numbers_that_are_not_finite_are_seen_in_sums_that_nobody_has_made_yet():
    rows = rows_of_pairs(True, 256)
    assert rows.rows.isnan().any() and not _is_broken(rows)
    assert _is_broken(rows.plus(torch.full((5, 256), float("inf"), device=DEVICE)))


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


@needs_gpu  # Triton 3.9's interpreter does not get through quantising within a product
@pytest.mark.parametrize("block", [(128, 128), (128, 64)], ids=str)
def test_tokens_that_come_quantised_are_those_that_would_be_quantised_here(block: tuple[int, int]):
    stored, count, hidden, inner = WeightFormat("fp8", "block", block), 6, 384, 256
    shapes = ((count, 2 * inner, hidden), (count, hidden, inner))
    stacks = [torch.randn(shape, device=DEVICE).to(torch.float8_e4m3fn) for shape in shapes]
    grids = [(count, rows // block[0], columns // block[1]) for _, rows, columns in shapes]
    scales = [torch.rand(grid, device=DEVICE) / 16 for grid in grids]
    problem = MoEProblem(count, 2, hidden, inner, stored, (ActScheme.DYNAMIC_GROUP128,))
    experts = Experts(problem, MoETensors(stored, *stacks, *scales))
    x = torch.randn(5, hidden, device=DEVICE).bfloat16()
    given = QuantizedInput(*kernels.quantise(x), x.dtype)
    ids = torch.stack([torch.randperm(count, device=DEVICE)[:2] for _ in range(5)])
    weights = torch.rand(5, 2, device=DEVICE)
    plans = {experts._fitted(plan) for _, plan in experts.plans}
    assert {plan.quantises_first for plan in plans} >= {True}
    for plan in plans:
        found, floats = (experts(tokens, weights, ids, plan) for tokens in (given, x))
        assert found.dtype == x.dtype
        if plan.quantises_first:
            assert torch.equal(found, floats)
        else:  # divisions there are not rounded as IEEE asks, so some go to the next E4M3 number
            assert (found - floats).float().norm() < 0.01 * floats.float().norm()
