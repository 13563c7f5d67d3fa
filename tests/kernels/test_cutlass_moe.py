"""Experts of the CUTLASS backend, on the CPU, where its ops are computed by their references."""

import pytest
import torch
from torch import Tensor

from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.interface import MoEKernel, MoETensors
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import MoEProblem
from vllm.ops.moe_router import route
from vllm.utils.fp8 import dequantise_blocks

FORMAT = WeightFormat.parse("fp8-block")
# experts, top k, hidden, intermediate: whole blocks; blocks that end inside on both axes.
SIZES = ((6, 2, 256, 128), (5, 3, 272, 144), (1, 1, 128, 576))


def experts(count: int, hidden: int, inner: int) -> MoETensors:
    """Random weights whose products with rows of ones' size are of ones' size."""

    def stacked(shard_rows: tuple[int, ...], columns: int) -> tuple[Tensor, Tensor]:
        values = torch.randn(count, sum(shard_rows), columns) * 30
        scales = torch.rand(count, *FORMAT.scale_shape(shard_rows, columns)) + 0.5
        return values.to(torch.float8_e4m3fn), scales / 30 / columns**0.5

    gate_up, gate_up_scales = stacked((inner, inner), hidden)
    down, down_scales = stacked((hidden,), inner)
    return MoETensors(FORMAT, gate_up, down, gate_up_scales, down_scales)


def kernel_of(tensors: MoETensors, top_k: int) -> MoEKernel:
    count, hidden, inner = tensors.down.shape
    problem = MoEProblem(
        count, top_k, hidden, inner, FORMAT, (ActScheme.DYNAMIC_GROUP128,), dtype="bf16"
    )
    winner = Candidate("cutlass", problem.act[0], fit=problem.block_fit(False))
    return registry.backend("cutlass").moe(problem, tensors, winner)


def expected(tensors: MoETensors, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """In float64, with activations as they are."""
    wide = []
    for expert in range(tensors.num_experts):
        gate_up, down = tensors.expert(expert)
        halves = zip(gate_up.weight.chunk(2), gate_up.scales.chunk(2))
        gate, up = (dequantise_blocks(w, s, FORMAT.block).double() for w, s in halves)
        wide.append((gate, up, dequantise_blocks(down.weight, down.scales, FORMAT.block).double()))
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for share, expert in zip(weights[token].double(), ids[token]):
            gate, up, down = wide[int(expert)]
            out[token] += share * (down @ (torch.nn.functional.silu(gate @ row) * (up @ row)))
    return out


def relative_error(y: Tensor, wanted: Tensor) -> float:
    return float((y.double() - wanted).norm() / wanted.norm())


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_token_gets_the_weighted_sum_of_its_experts(sizes):
    count, top_k, hidden, inner = sizes
    tensors = experts(count, hidden, inner)
    kernel = kernel_of(tensors, top_k)
    for num_tokens in (1, 2, 33):
        x = torch.randn(num_tokens, hidden).bfloat16()
        weights, ids = route(torch.randn(num_tokens, count), top_k, renormalise=True)
        y = kernel(x, weights, ids)
        assert y.dtype == x.dtype
        # Activations are rounded to E4M3, by about 2.6 %, as gate's input, as up's and as down's.
        assert relative_error(y, expected(tensors, x, weights, ids)) < 0.06


def test_no_tokens_give_no_results():
    kernel = kernel_of(experts(4, 128, 128), 2)
    y = kernel(torch.empty(0, 128).bfloat16(), torch.empty(0, 2), torch.empty(0, 2).long())
    assert y.shape == (0, 128)


def test_experts_that_nobody_asks_for_do_not_count():
    tensors = experts(5, 128, 256)
    x, ids = torch.randn(9, 128).bfloat16(), torch.tensor([[3, 1]] * 9)
    weights = torch.full((9, 2), 0.5)
    wanted = kernel_of(tensors, 2)(x, weights, ids)
    tensors.down_scales[[0, 2, 4]] = float("nan")
    assert torch.equal(kernel_of(tensors, 2)(x, weights, ids), wanted)


def test_a_token_has_the_same_result_in_any_company():
    kernel = kernel_of(experts(8, 256, 128), 3)
    x, logits = torch.randn(40, 256).bfloat16(), torch.randn(40, 8)
    whole = kernel(x, *route(logits, 3, renormalise=True))
    for rows in (slice(0, 1), slice(7, 12)):
        part = kernel(x[rows], *route(logits[rows], 3, renormalise=True))
        torch.testing.assert_close(part, whole[rows], rtol=2**-7, atol=1e-3)
