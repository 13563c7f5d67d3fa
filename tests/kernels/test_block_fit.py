"""A shard with partial scale blocks is the shard of the whole weight, bit for bit, as planned."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad, silu

from vllm.formats.weight_format import WeightFormat
from vllm.kernels.interface import LinearTensors
from vllm.kernels.select.problem import LinearProblem, MoEProblem
from vllm.ops.block_fit import pad_weight, padded_tensors
from vllm.utils.fp8 import FP8, dequantise_blocks, per_block_cast_to_fp8
from vllm.utils.math_utils import cdiv

TP = (1, 2, 4, 8, 16, 32)
BLOCK = (16, 16)  # small enough for weights of many blocks
FORMAT = WeightFormat("fp8", "block", BLOCK)
sizes = st.integers(1, 60)
ranks = st.sampled_from(TP)
seeds = st.integers(0, 2**31)


def random_weight(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random codes, and a scale of its own for every block."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 0x7F, shape, generator=generator, dtype=torch.uint8).view(FP8)
    grid = (*shape[:-2], cdiv(shape[-2], BLOCK[0]), cdiv(shape[-1], BLOCK[1]))
    return q, torch.rand(grid, generator=generator) + 0.5


def small_integers(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights and scales whose products and sums are exact in float32, in any order."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-1, 2, shape, generator=generator).to(FP8)
    grid = (*shape[:-2], cdiv(shape[-2], BLOCK[0]), cdiv(shape[-1], BLOCK[1]))
    return q, torch.randint(1, 4, grid, generator=generator).float()


def span(size: int, rank: int) -> tuple[int, int]:
    return rank * size, (rank + 1) * size


def wide(q: Tensor, scales: Tensor, block=BLOCK) -> Tensor:
    return dequantise_blocks(q, scales, block)


def refine_scales(
    scales: Tensor, block, fine, rows: tuple[int, int], columns: tuple[int, int]
) -> Tensor:
    """Scales of one shard in blocks of `fine`, which divides `block` and where the shard starts.

    Every fine block lies inside one coarse block, whose scale it repeats. Only the shard's last
    row or column of blocks may be partial.
    """
    places = []
    for span, coarse, step in zip((rows, columns), block, fine):
        assert coarse % step == 0 and span[0] % step == 0, (span, coarse, step)
        places.append(torch.arange(*span, step, device=scales.device) // coarse)
    return scales[..., places[0], :][..., places[1]]


# ---------------------------------------------------------------- shards of one weight


@settings(max_examples=80, deadline=None)
@given(n=sizes, k=sizes, tp=ranks, cuts_rows=st.booleans(), seed=seeds)
def test_a_refined_shard_is_the_shard_of_the_whole(n, k, tp, cuts_rows, seed):
    cut_n, cut_k = (tp, 1) if cuts_rows else (1, tp)
    problem = LinearProblem(n, k, FORMAT, cut_n=cut_n, cut_k=cut_k)
    fit = problem.block_fit(True)
    fine = fit.block if fit else BLOCK
    q, scales = random_weight(n * cut_n, k * cut_k, seed=seed)
    whole = wide(q, scales)
    num_bytes, num_touched = [], []
    for rank in range(tp):
        rows, columns = span(n, rank * cuts_rows), span(k, rank * (not cuts_rows))
        own = refine_scales(scales, BLOCK, fine, rows, columns)
        shard = wide(q[slice(*rows), slice(*columns)], own, fine)
        assert torch.equal(shard, whole[slice(*rows), slice(*columns)])
        num_bytes.append(own.nbytes)
        num_touched.append(touched(rows, 0) * touched(columns, 1) * 4)
    assert max(num_bytes) - max(num_touched) == (fit.extra_bytes if fit else 0)


def touched(part: tuple[int, int], axis: int) -> int:
    return cdiv(part[1], BLOCK[axis]) - part[0] // BLOCK[axis]


@settings(max_examples=80, deadline=None)
@given(n=sizes, k=sizes, tp=ranks, cuts_rows=st.booleans(), seed=seeds)
def test_a_padded_shard_is_the_shard_of_the_whole_and_zeros(n, k, tp, cuts_rows, seed):
    cut_n, cut_k = (tp, 1) if cuts_rows else (1, tp)
    fit = LinearProblem(n, k, FORMAT, cut_n=cut_n, cut_k=cut_k).block_fit(False)
    q, scales = random_weight(n * cut_n, k * cut_k, seed=seed)
    whole = wide(q, scales)
    extra = []
    for rank in range(tp):
        rows, columns = span(n, rank * cuts_rows), span(k, rank * (not cuts_rows))
        own = q[slice(*rows), slice(*columns)]
        padded = pad_weight(own, scales, BLOCK, rows, columns)
        assert padded.weight.shape[0] % BLOCK[0] == padded.weight.shape[1] % BLOCK[1] == 0
        result = wide(padded.weight, padded.scales)
        place = result[padded.row_offset :][:n, padded.column_offset :][:, :k]
        assert torch.equal(place, whole[slice(*rows), slice(*columns)])
        place.zero_()
        assert not result.any()
        extra.append(padded.weight.nbytes - own.nbytes)
    if fit is not None:
        assert max(extra) == fit.extra_bytes
        assert fit.sizes[0] * fit.sizes[1] == n * k + fit.extra_bytes


@settings(max_examples=60, deadline=None)
@given(n=sizes, k=sizes, tp=ranks, cuts_rows=st.booleans(), seed=seeds)
def test_padded_shards_compute_the_product_of_the_whole(n, k, tp, cuts_rows, seed):
    q, scales = small_integers(n * (tp if cuts_rows else 1), k * (1 if cuts_rows else tp))
    x = torch.randint(-2, 3, (3, q.shape[1])).float()
    outputs = []
    for rank in range(tp):
        rows, columns = span(n, rank * cuts_rows), span(k, rank * (not cuts_rows))
        own = q[slice(*rows), slice(*columns)]
        padded = pad_weight(own, scales, BLOCK, rows, columns)
        before, size = padded.column_offset, padded.weight.shape[1]
        wide_x = pad(x[:, slice(*columns)], (before, size - before - k))
        y = wide_x @ wide(padded.weight, padded.scales).T
        outputs.append(y[:, padded.row_offset :][:, :n])
    result = torch.cat(outputs, 1) if cuts_rows else sum(outputs)
    assert torch.equal(result, x @ wide(q, scales).T)


def test_18432_columns_over_32_ranks_are_576_each_in_blocks_of_64():
    format = WeightFormat("fp8", "block", (128, 128))
    problem = LinearProblem(256, 576, format, cut_k=32)
    q, scales = per_block_cast_to_fp8(torch.randn(256, 18432))
    whole = dequantise_blocks(q, scales)
    refined, padded = (problem.block_fit(any_block) for any_block in (True, False))
    assert refined.block == (128, 64) and padded.sizes == (256, 640)
    for rank in range(32):
        columns = span(576, rank)
        own = q[:, slice(*columns)]
        fine = refine_scales(scales, (128, 128), refined.block, (0, 256), columns)
        assert torch.equal(dequantise_blocks(own, fine, (128, 64)), whole[:, slice(*columns)])
        filled = pad_weight(own, scales, (128, 128), (0, 256), columns)
        assert filled.weight.shape == (256, 640) and filled.column_offset == 64 * (rank % 2)
        result = dequantise_blocks(filled.weight, filled.scales)
        place = result[:, filled.column_offset :][:, :576]
        assert torch.equal(place, whole[:, slice(*columns)])


# ---------------------------------------------------------------- merged parts


@st.composite
def merged_layers(draw):
    parts = tuple(draw(st.lists(sizes, min_size=1, max_size=3)))
    pairs = [random_weight(n, 40, seed=draw(seeds)) for n in parts]
    weight, scales = (torch.cat(tensors) for tensors in zip(*pairs))
    whole = torch.cat([wide(*pair) for pair in pairs])
    bias = torch.arange(float(len(weight)))
    return LinearTensors(FORMAT, weight, parts, scales, bias), whole


def problem_of(tensors: LinearTensors) -> LinearProblem:
    return LinearProblem(*tensors.weight.shape, FORMAT, parts=tensors.shard_rows)


@settings(max_examples=60, deadline=None)
@given(merged_layers())
def test_padding_merged_parts_gives_whole_blocks_and_the_rows_to_keep(layer):
    tensors, whole = layer
    fit = problem_of(tensors).block_fit(False)
    padded, kept = padded_tensors(tensors)
    result = wide(padded.weight, padded.scales)
    assert torch.equal(result[kept][:, : whole.shape[1]], whole)
    assert result.count_nonzero() == whole.count_nonzero()
    if fit is not None:
        assert tuple(padded.weight.shape) == fit.sizes
        assert padded.weight.nbytes - tensors.weight.nbytes == fit.extra_bytes


@settings(max_examples=80, deadline=None)
@given(parts=st.lists(sizes, min_size=2, max_size=3), tp=ranks)
def test_padding_merged_shards_costs_what_the_worst_rank_needs(parts, tp):
    problem = LinearProblem(sum(parts), 16, FORMAT, parts=tuple(parts), cut_n=tp)
    fit = problem.block_fit(False)
    assume(fit is not None)
    grids = [torch.ones(cdiv(n * tp, 16), 1) for n in parts]
    worst = max(
        sum(
            pad_weight(torch.zeros(n, 16).to(FP8), grid, BLOCK, span(n, r), (0, 16)).weight.nbytes
            for n, grid in zip(parts, grids)
        )
        for r in range(tp)
    )
    assert worst - sum(parts) * 16 == fit.extra_bytes


# ---------------------------------------------------------------- mixtures of experts


def moe_parts(tp: int, inner: int, hidden: int, seed: int):
    gate, up = (small_integers(3, inner * tp, hidden, seed=seed + i) for i in range(2))
    return gate, up, small_integers(3, hidden, inner * tp, seed=seed + 2)


@settings(max_examples=40, deadline=None)
@given(inner=sizes, hidden=sizes, tp=ranks, seed=seeds)
def test_refined_experts_are_the_shards_of_the_whole(inner, hidden, tp, seed):
    problem = MoEProblem(3, 1, hidden, inner, FORMAT, cut=tp)
    fit = problem.block_fit(True)
    rows, columns = fit.block if fit else BLOCK
    gate, up, down = moe_parts(tp, inner, hidden, seed)
    all_of = (0, hidden)
    extra = []
    for rank in range(tp):
        own = span(inner, rank)
        num_bytes = 0
        for q, scales in (gate, up):
            fine = refine_scales(scales, BLOCK, (rows, BLOCK[1]), own, all_of)
            shard = wide(q[:, slice(*own)], fine, (rows, BLOCK[1]))
            assert torch.equal(shard, wide(q, scales)[:, slice(*own)])
            num_bytes += fine.nbytes - 4 * 3 * touched(own, 0) * cdiv(hidden, 16)
        q, scales = down
        fine = refine_scales(scales, BLOCK, (BLOCK[0], columns), all_of, own)
        shard = wide(q[..., slice(*own)], fine, (BLOCK[0], columns))
        assert torch.equal(shard, wide(q, scales)[..., slice(*own)])
        extra.append(num_bytes + fine.nbytes - 4 * 3 * touched(own, 1) * cdiv(hidden, 16))
    # Refined shards are all of one size, so the rank that touches fewest blocks gains most.
    assert min(extra) == (fit.extra_bytes if fit else 0)


@settings(max_examples=40, deadline=None)
@given(inner=sizes, hidden=st.sampled_from((16, 48)), tp=ranks, seed=seeds)
def test_padded_experts_compute_the_same_without_touching_their_inputs(inner, hidden, tp, seed):
    fit = MoEProblem(3, 1, hidden, inner, FORMAT, cut=tp).block_fit(False)
    gate, up, down = moe_parts(tp, inner, hidden, seed)
    x = torch.randint(-2, 3, (3, 4, hidden)).double()  # 4 tokens of each expert
    extra = []
    for rank in range(tp):
        own = span(inner, rank)
        wides, num_bytes = [], 0
        for q, scales in (gate, up):
            shard = q[:, slice(*own)]
            padded = pad_weight(shard, scales, BLOCK, own, (0, hidden))
            wides.append((shard_of(wide(q, scales), own, 1), wide(padded.weight, padded.scales)))
            num_bytes += padded.weight.nbytes - shard.nbytes
        q, scales = down
        shard = q[..., slice(*own)]
        padded = pad_weight(shard, scales, BLOCK, (0, hidden), own)
        wides.append((shard_of(wide(q, scales), own, 2), wide(padded.weight, padded.scales)))
        extra.append(num_bytes + padded.weight.nbytes - shard.nbytes)
        plain, filled = (experts(x, *(pair[i].double() for pair in wides)) for i in range(2))
        torch.testing.assert_close(filled, plain, rtol=1e-10, atol=1e-10)
    if fit is not None:
        assert max(extra) == fit.extra_bytes


def shard_of(whole: Tensor, own: tuple[int, int], axis: int) -> Tensor:
    return whole.narrow(axis, own[0], own[1] - own[0])


def experts(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    inner = silu(x @ gate.transpose(1, 2)) * (x @ up.transpose(1, 2))
    return inner @ down.transpose(1, 2)


def test_a_grid_that_does_not_reach_the_shard_is_our_own_mistake():
    with pytest.raises(AssertionError):
        refine_scales(torch.ones(4, 4), BLOCK, (16, 16), (8, 24), (0, 64))
