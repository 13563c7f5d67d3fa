"""Scale blocks that shards cut are taken exactly: checked row by row against the whole weight."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from selection_cases import linear, moe

from vllm.formats.weight_format import WeightFormat

BLOCKS = st.sampled_from([8, 16, 32])
SIZES = st.integers(1, 80)
CUTS = st.integers(1, 5)


def block_ids(size: int, cut: int, rank: int, block: int) -> list[int]:
    """Which block of the whole weight each row of a rank's shard lies in."""
    return [row // block for row in range(rank * size, (rank + 1) * size)]


def merged_ids(parts: tuple[int, ...], cut: int, rank: int, block: int) -> list[tuple[int, int]]:
    """The same for parts merged behind each other, each with blocks of its own."""
    return [
        (part, block_id)
        for part, size in enumerate(parts)
        for block_id in block_ids(size, cut, rank, block)
    ]


def is_plain(ids: list, block: int) -> bool:
    """Whether one scale for every `block` rows says the same as the scales of the whole weight."""
    groups = [ids[start : start + block] for start in range(0, len(ids), block)]
    return all(len(set(group)) == 1 for group in groups)


def fp8_linear(parts, k, block, cut_n, cut_k):
    weight = WeightFormat("fp8", "block", (block, block))
    return replace(
        linear(), weight=weight, n=sum(parts), k=k, parts=parts, cut_n=cut_n, cut_k=cut_k
    )


PARTS = st.lists(SIZES, min_size=1, max_size=3).map(tuple)


@given(PARTS, SIZES, BLOCKS, CUTS, CUTS)
def test_a_weight_without_a_fit_has_a_plain_grid_on_every_rank(parts, k, block, cut_n, cut_k):
    problem = fp8_linear(parts, k, block, cut_n, cut_k)
    rows = [is_plain(merged_ids(parts, cut_n, rank, block), block) for rank in range(cut_n)]
    columns = [is_plain(block_ids(k, cut_k, rank, block), block) for rank in range(cut_k)]
    if problem.block_fit(True) is None:
        assert all(rows) and all(columns)


@given(PARTS, SIZES, BLOCKS, CUTS, CUTS)
def test_refined_scales_are_those_of_the_whole_weight(parts, k, block, cut_n, cut_k):
    fit = fp8_linear(parts, k, block, cut_n, cut_k).block_fit(True)
    if fit is None:
        return
    assert fit.how == "refined" and fit.sizes == (sum(parts), k)
    assert block % fit.block[0] == block % fit.block[1] == 0
    for rank in range(cut_n):
        assert is_plain(merged_ids(parts, cut_n, rank, block), fit.block[0])
    for rank in range(cut_k):
        assert is_plain(block_ids(k, cut_k, rank, block), fit.block[1])


@given(PARTS, SIZES, BLOCKS, CUTS, CUTS)
def test_padded_sizes_are_whole_blocks_on_the_rank_that_touches_most(parts, k, block, cut_n, cut_k):
    fit = fp8_linear(parts, k, block, cut_n, cut_k).block_fit(False)
    if fit is None:
        return
    rows = max(len(set(merged_ids(parts, cut_n, rank, block))) for rank in range(cut_n))
    columns = max(len(set(block_ids(k, cut_k, rank, block))) for rank in range(cut_k))
    assert fit.how == "padded" and fit.block == (block, block)
    assert fit.sizes == (rows * block, columns * block)
    assert fit.extra_bytes == fit.sizes[0] * fit.sizes[1] - sum(parts) * k


@given(SIZES, BLOCKS, CUTS, st.integers(1, 4))
def test_a_moe_pads_gate_up_and_down_alike(size, block, cut, cut_experts):
    weight = WeightFormat("fp8", "block", (block, block))
    problem = replace(
        moe(), weight=weight, intermediate=size, cut=cut, num_experts=10, cut_experts=cut_experts
    )
    fit = problem.block_fit(False)
    if size % block == 0:
        assert fit is None
        return
    blocks = max(len(set(block_ids(size, cut, rank, block))) for rank in range(cut))
    assert fit.sizes == (blocks * block, problem.hidden)
    rank_with_most = -(-10 // cut_experts)
    assert fit.extra_bytes == rank_with_most * 3 * (blocks * block - size) * problem.hidden


def test_a_shard_of_576_rows_is_served_both_ways():
    shard = linear(n=576, cut_n=32)
    assert shard.block_fit(True).block == (64, 128)
    assert shard.block_fit(False).sizes == (640, 4096)


def test_merged_shards_of_576_192_and_192_rows_keep_nine_rows_of_scales():
    merged = linear(n=960, k=128, parts=(576, 192, 192))
    assert merged.block_fit(False).sizes == ((5 + 2 + 2) * 128, 128)


def test_a_partial_last_block_of_a_whole_weight_needs_nothing():
    assert linear(n=576, k=4160).block_fit(False) is None
