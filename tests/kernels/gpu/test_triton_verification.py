"""The decode kernel of the Triton attention with several new tokens of a request, as steps that
verify draft tokens have them, against float64."""

import pytest
import torch
from test_triton_attention import (
    DTYPES,
    FP8,
    Allocations,
    Batch,
    assert_close,
    poisoned,
)
from triton_device import DEVICE, IS_INTERPRETED, MARKS, needs_gpu

from vllm.kernels.triton import attention as kernels
from vllm.utils.math_utils import next_power_of_2

pytestmark = MARKS
# (new tokens, keys): all new, padding, without keys, and from one to several splits, whose last
# begins before, in and after the new tokens.
MIXED = [(2, 150), (0, 40), (1, 1), (3, 3), (5, 260), (8, 9), (3, 0), (1, 130), (8, 193), (2, 129)]
FEW = [(2, 150), (0, 0), (2, 2), (1, 0), (2, 257)]
HEADS = {1: (2, 2), 2: (4, 2), 3: (9, 3), 5: (10, 2), 7: (14, 2), 8: (16, 2)}


@pytest.fixture(autouse=True)
def splits_of_one_tile(request, monkeypatch) -> None:
    """A chip that asks for as many splits as there may be, of one or two tiles of keys."""
    chip = kernels.read_chip(torch.zeros(1, device=DEVICE).device)
    monkeypatch.setattr(kernels, "read_chip", lambda device: chip._replace(num_sms=2000))
    monkeypatch.setattr(kernels, "SHORT_SPLIT", 64)
    monkeypatch.setattr(kernels, "KEYS_PER_ROW", 0)


def attended(batch: Batch, max_seq_len: int = 400) -> torch.Tensor:
    """The result, of which partial results of as many queries as there are were added up."""
    num_heads, num_kv_heads = batch.query.shape[1], batch.k_cache.shape[2]
    most = max(batch.max_query_len, *(n for n, _ in batch.requests))
    choices = kernels.verify_queries(num_heads // num_kv_heads, max(64, batch.query.shape[2]))
    queries = next(n for n in choices if n >= most)
    with Allocations() as made:
        out = batch.attend(max_seq_len)
    rows = [shape[1] for shape in made.shapes if len(shape) == 4 and shape[0] == len(batch.lens)]
    assert rows == [num_heads * queries]
    return out


@pytest.mark.parametrize("group", HEADS)
def test_heads_in_groups_of_any_size(group: int) -> None:
    batch = Batch(MIXED, *HEADS[group])
    assert_close(attended(batch), batch.expected())


@pytest.mark.parametrize("requests", (MIXED, FEW), ids=("mixed", "few"))
def test_splits_are_as_long_as_planned(requests: list, monkeypatch) -> None:
    monkeypatch.undo()
    if IS_INTERPRETED:  # one with few multiprocessors
        chip = kernels.read_chip(torch.device("cpu"))
        monkeypatch.setattr(kernels, "read_chip", lambda device: chip._replace(num_sms=132))
    batch = Batch([*requests, (2, 1100)], 16, 2, 64)
    assert_close(attended(batch, 2048), batch.expected())


@pytest.mark.parametrize("num_heads, num_kv_heads, dim", ((2, 1, 256), (6, 3, 80), (4, 2, 96)))
def test_heads_of_other_sizes(num_heads: int, num_kv_heads: int, dim: int) -> None:
    batch = Batch(MIXED, num_heads, num_kv_heads, dim)
    assert_close(attended(batch), batch.expected())


def test_a_tile_of_few_rows_has_large_heads() -> None:
    batch = Batch(FEW, 8, 1, 256)
    assert_close(attended(batch), batch.expected())


@pytest.mark.parametrize("bound", (3, 8))
def test_a_bound_above_all_requests_changes_nothing(bound: int) -> None:
    batch = Batch(FEW, 16, 2, 64)
    batch.max_query_len = bound
    assert_close(attended(batch), batch.expected())


@pytest.mark.parametrize("is_chunked", (False, True))
@pytest.mark.parametrize("window", (1, 5, 64, 100))
def test_windows_and_chunks_end_at_each_token(window: int, is_chunked: bool) -> None:
    batch = Batch(MIXED, 4, 1, 64, window=window)
    batch.is_chunked = is_chunked
    assert_close(attended(batch), batch.expected())


@pytest.mark.parametrize("window", (0, 4))
def test_sinks_count_once_for_each_token(window: int) -> None:
    batch = Batch(MIXED, 8, 1, 64, window=window, has_sinks=True)
    given = attended(batch)
    assert_close(given, batch.expected())
    batch.sinks = None
    with pytest.raises(AssertionError):
        assert_close(given, batch.expected())


@pytest.mark.parametrize("window", (0, 4))
def test_scores_are_soft_capped(window: int) -> None:
    batch = Batch(MIXED, 4, 2, 64, window=window)
    batch.softcap, batch.scale = 1.5, 4 * batch.scale
    assert_close(attended(batch), batch.expected())


@pytest.mark.parametrize("dtype, block_size", ((DTYPES[0], 16), (DTYPES[-1], 32)), ids=str)
def test_fp8_caches(dtype: torch.dtype, block_size: int) -> None:
    batch = Batch(
        MIXED, 16, 2, dtype=dtype, cache_dtype=FP8, block_size=block_size, scales=(0.03, 0.05)
    )
    assert_close(attended(batch), batch.expected())


@pytest.mark.parametrize("num_padding", (0, 1, 50))
def test_rows_of_no_request_become_zeros(num_padding: int) -> None:
    batch = Batch([*FEW, (0, 70), (3, 0)], 4, 1, 64, num_padding=num_padding)
    out, expected = attended(batch), batch.expected()
    assert_close(out, expected)
    is_empty = (expected == 0).flatten(1).all(1)
    assert int(is_empty.sum()) >= num_padding + 4
    assert not out[is_empty].any()


def test_large_scores_do_not_overflow() -> None:
    batch = Batch(MIXED, 4, 1, window=3)
    batch.scale = 40.0
    assert_close(attended(batch), batch.expected())


def test_splits_add_up_to_the_same_bits_at_every_call() -> None:
    batch = Batch([(4, 500), (2, 0), (3, 3), (1, 900)], 4, 2, 64)
    first = attended(batch, 1000).clone()
    assert_close(first, batch.expected())
    for _ in range(2 if IS_INTERPRETED else 200):
        assert torch.equal(batch.attend(1000), first)
    assert not kernels.arrival_counters(first.device).any()


@pytest.mark.parametrize("parts", (0, 1, 3))
def test_partial_results_take_no_more_memory_than_there_is(parts: int, monkeypatch) -> None:
    """Of two requests of 4 queries of 4 heads of 64, as many parts as there is room for."""
    monkeypatch.setattr(kernels, "PARTIAL_BYTES", parts * 4 * 2 * 4 * 8 * 64)
    batch = Batch([(8, 400), (3, 700)], 4, 2, 64)
    with Allocations() as made:
        out = batch.attend(1000)
    shapes = [shape for shape in made.shapes if len(shape) == 4]
    assert shapes == [(2, 4 * 8, parts, 64)] * (parts > 1)
    assert_close(out, batch.expected())


@pytest.mark.parametrize("dim_pad", (64, 128, 256))
@pytest.mark.parametrize("group", (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 33, 64))
def test_tiles_are_few_and_not_too_large(group: int, dim_pad: int) -> None:
    choices = kernels.verify_queries(group, dim_pad)
    assert len(choices) <= 3 and choices == sorted(set(choices))
    for queries in choices:
        rows = next_power_of_2(queries * group)
        assert 2 <= queries <= 16 and rows <= 64 and rows * dim_pad <= 64 * 128
    assert (max(choices, default=1) >= 2) == (group <= min(64, 8192 // dim_pad) // 2)


@needs_gpu
@pytest.mark.parametrize("window", (0, 3))
@pytest.mark.parametrize("queries", (2, 4, 8))
@pytest.mark.parametrize("cache_dtype", (None, FP8), ids=str)
def test_a_captured_graph_serves_other_steps(cache_dtype, queries: int, window: int) -> None:
    """Of fewer requests, of fewer new tokens each, and of none."""
    options = {"cache_dtype": cache_dtype, "window": window}
    if cache_dtype == FP8:
        options["scales"] = (0.03, 0.05)
    batch = Batch([(queries, 2000)] * 6, 16, 2, **options)
    num_rows = batch.query.shape[0]
    out = poisoned(tuple(batch.query.shape), batch.query.dtype)
    batch.attend(out=out)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.attend(out=out)
    most = queries
    for requests in (
        [(most, 2000)] * 6,
        [(most, most), (1, 2000), (2, 129), (most, 700), (0, 0), (1, 1)],
        [(2, 1500), (1, 17)],
        [(0, 0), (most, 130), (0, 500)],
    ):
        used = sum(n for n, _ in requests)
        later = Batch(requests, 16, 2, num_padding=num_rows - used, **options)
        batch.query.copy_(later.query)
        for cache, other in ((batch.k_cache, later.k_cache), (batch.v_cache, later.v_cache)):
            cache.copy_(poisoned(tuple(cache.shape), cache.dtype))
            cache[: len(other)] = other
        batch.tables.fill_(len(batch.k_cache) - 1)
        batch.tables[: len(requests), : later.tables.shape[1]] = later.tables
        batch.lens.zero_()[: len(requests)] = later.lens
        batch.starts.fill_(used)[: len(requests) + 1] = later.starts
        out.fill_(float("nan"))
        graph.replay()
        expected = later.expected()
        assert_close(out, expected)
        assert not out[(expected == 0).flatten(1).all(1)].any()
