"""The Triton attention and cache writes against float64, with NaN wherever nothing may be read.

The interpreter cannot multiply bfloat16.
"""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton_device import DEVICE, IS_INTERPRETED, MARKS, needs_gpu

from vllm.kernels.triton import attention as kernels

pytestmark = MARKS
FP8 = torch.float8_e4m3fn
DTYPES = [torch.bfloat16] if IS_INTERPRETED else [torch.bfloat16, torch.float16]
TOLERANCES = {torch.bfloat16: 5e-3, torch.float16: 1e-3}
"""Of ||out - ref|| / ||ref||: weights and outputs are rounded to the type of the query."""


class Batch:
    """Requests of (new tokens, keys) over shuffled cache blocks that hold NaN where not written.

    `num_padding` rows follow the last request's, as in a captured graph with free places.
    """

    softcap = 0.0
    is_chunked = False
    max_query_len = 0  # a bound above the new tokens of all requests

    def __init__(
        self,
        requests: Sequence[tuple[int, int]],
        num_heads: int = 8,
        num_kv_heads: int = 2,
        dim: int = 128,
        dtype: torch.dtype = DTYPES[0],
        cache_dtype: torch.dtype | None = None,
        block_size: int = 16,
        scales: tuple[float, float] = (1.0, 1.0),
        window: int = 0,
        num_padding: int = 0,
        has_sinks: bool = False,
    ):
        self.requests, self.scales, self.window = list(requests), scales, window
        self.block_size, self.scale = block_size, 1 / math.sqrt(dim)
        self.sinks = torch.randn(num_heads, device=DEVICE) * 3 if has_sinks else None
        lens = [keys for _, keys in requests]
        counts = [-(-n // block_size) for n in lens]
        num_blocks = sum(counts) + 2
        shape = (num_blocks, block_size, num_kv_heads, dim)
        cache_dtype = cache_dtype or dtype
        self.k_cache, self.v_cache = (poisoned(shape, cache_dtype) for _ in range(2))
        ids = torch.randperm(num_blocks, device=DEVICE).int()
        # Unused entries name a block of NaN.
        self.tables = ids[-1].repeat(len(lens), max([*counts, 1]) + 1)
        self.keys, self.values = [], []
        for r, (count, some) in enumerate(zip(counts, ids[:-2].split(counts), strict=True)):
            self.tables[r, :count] = some
            k, v = (torch.randn(lens[r], num_kv_heads, dim, device=DEVICE) for _ in range(2))
            k, v = encode(k, scales[0], cache_dtype), encode(v, scales[1], cache_dtype)
            slots = some.long().repeat_interleave(block_size) * block_size
            slots = (slots + torch.arange(count * block_size, device=DEVICE) % block_size)[
                : lens[r]
            ]
            write_bytes(self.k_cache, slots, k)
            write_bytes(self.v_cache, slots, v)
            self.keys.append(k.double() * scales[0])
            self.values.append(v.double() * scales[1])
        starts = torch.tensor([0, *(n for n, _ in requests)]).cumsum(0)
        self.starts = starts.int().to(DEVICE)
        self.lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        num_tokens = int(starts[-1]) + num_padding
        # A view of a qkv tensor: tokens are further apart than heads * dim.
        qkv = torch.randn(num_tokens, num_heads + 2, dim, device=DEVICE).to(dtype)
        self.query = qkv[:, :num_heads]

    def attend(self, max_seq_len: int | None = None, out: Tensor | None = None) -> Tensor:
        out = poisoned(tuple(self.query.shape), self.query.dtype) if out is None else out
        result = kernels.paged_attention(
            self.query,
            self.k_cache,
            self.v_cache,
            self.tables,
            self.starts,
            self.lens,
            self.scale,
            self.window,
            *self.scales,
            out=out,
            sinks=self.sinks,
            softcap=self.softcap,
            is_chunked=self.is_chunked,
            max_query_len=max(1, self.max_query_len, *(n for n, _ in self.requests)),
            max_seq_len=max_seq_len or max(n for _, n in self.requests),
        )
        assert result is out
        return result

    def expected(self) -> Tensor:
        """In float64; zeros for requests without keys and for padding."""
        result = torch.zeros(self.query.shape, dtype=torch.float64, device=DEVICE)
        group = self.query.shape[1] // self.k_cache.shape[2]
        start = 0
        for (query_len, seq_len), k, v in zip(self.requests, self.keys, self.values, strict=True):
            rows = slice(start, start + query_len)
            start += query_len
            if seq_len == 0:
                continue
            q = self.query[rows].double().transpose(0, 1)
            k, v = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
            scores = q @ k.transpose(1, 2) * self.scale
            if self.softcap:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            position = torch.arange(seq_len, device=DEVICE)
            distance = position[seq_len - query_len :, None] - position
            limit = position[seq_len - query_len :, None] % max(self.window, 1) + 1
            limit = limit if self.is_chunked else self.window
            is_seen = (distance >= 0) & ((distance < limit) | (self.window == 0))
            scores = scores.masked_fill(~is_seen, -torch.inf)
            if self.sinks is not None:
                sinks = self.sinks.double()[:, None, None].expand(-1, query_len, 1)
                scores = torch.cat([scores, sinks], -1)
            weights = scores.softmax(-1)[..., :seq_len]
            result[rows] = (weights @ v).transpose(0, 1)
        return result


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """NaN in every element."""
    return torch.full(shape, float("nan"), device=DEVICE).to(dtype)


def encode(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """As the cache stores x; on the CPU, where the division is exact."""
    if dtype != FP8:
        return x.to(dtype)
    limit = torch.finfo(FP8).max
    return (x.cpu().float() / torch.tensor(scale)).clamp(-limit, limit).to(FP8).to(x.device)


def write_bytes(cache: Tensor, slots: Tensor, x: Tensor) -> None:
    cache.view(torch.uint8).flatten(0, 1)[slots] = x.view(torch.uint8)


def assert_close(out: Tensor, expected: Tensor) -> None:
    assert bool(torch.isfinite(out).all())
    error = (out.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert float(error) < TOLERANCES[out.dtype]


DECODES = [(1, n) for n in (1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 400, 1000)]
PROMPTS = [(n, n) for n in (1, 2, 15, 31, 33, 64, 129, 300)]
CHUNKS = [(3, 70), (64, 128), (65, 300), (130, 131), (1, 500), (7, 7)]


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize("requests", (DECODES, PROMPTS, CHUNKS), ids=("decode", "prompt", "mixed"))
@pytest.mark.parametrize("dim", (64, 80, 96, 128, 256))
def test_head_sizes(dim: int, requests: list) -> None:
    batch = Batch(requests, dim=dim)
    assert_close(batch.attend(), batch.expected())


@pytest.mark.parametrize("requests", (DECODES, CHUNKS), ids=("decode", "mixed"))
@pytest.mark.parametrize(
    "num_heads,num_kv_heads", ((2, 2), (9, 3), (8, 2), (14, 2), (8, 1), (16, 1))
)
def test_heads_in_groups_of_any_size(num_heads: int, num_kv_heads: int, requests: list) -> None:
    batch = Batch(requests, num_heads, num_kv_heads)
    assert_close(batch.attend(), batch.expected())


@pytest.mark.parametrize("requests", (DECODES, CHUNKS), ids=("decode", "mixed"))
@pytest.mark.parametrize("window", (1, 5, 64, 100, 128, 5000))
def test_a_sliding_window_hides_older_keys(window: int, requests: list) -> None:
    batch = Batch(requests, window=window)
    assert_close(batch.attend(), batch.expected())


@pytest.mark.parametrize("requests", (DECODES, PROMPTS, CHUNKS), ids=("decode", "prompt", "mixed"))
@pytest.mark.parametrize("chunk", (1, 64, 100, 5000))
def test_queries_see_the_keys_of_their_own_chunk(chunk: int, requests: list) -> None:
    batch = Batch(requests, window=chunk)
    batch.is_chunked = True
    assert_close(batch.attend(), batch.expected())


@pytest.mark.parametrize("is_chunked", (False, True))
def test_padding_reads_nothing_before_its_block_table(is_chunked: bool) -> None:
    batch = Batch([(40, 60), (300, 0)], window=20)
    batch.is_chunked = is_chunked
    wide = torch.full((2, 64 + batch.tables.shape[1]), 1 << 30, dtype=torch.int32, device=DEVICE)
    wide[:, 64:] = batch.tables
    batch.tables = wide[:, 64:]
    assert_close(batch.attend(), batch.expected())


@pytest.mark.parametrize("requests", (DECODES, PROMPTS, CHUNKS), ids=("decode", "prompt", "mixed"))
@pytest.mark.parametrize("window", (0, 64))
def test_scores_are_soft_capped(window: int, requests: list) -> None:
    batch = Batch(requests, window=window)
    batch.softcap, batch.scale = 1.5, 4 * batch.scale
    given = batch.attend()
    assert_close(given, batch.expected())
    batch.softcap = 0.0
    assert not torch.allclose(given, batch.attend(), atol=0.1)


@pytest.mark.parametrize("requests", (DECODES, PROMPTS, CHUNKS), ids=("decode", "prompt", "mixed"))
@pytest.mark.parametrize("window", (0, 64, 128))
def test_sinks_take_their_share_of_the_weights(window: int, requests: list) -> None:
    batch = Batch(requests, 16, 2, 64, window=window, has_sinks=True)
    given = batch.attend()
    assert_close(given, batch.expected())
    batch.sinks = None
    with pytest.raises(AssertionError):
        assert_close(given, batch.expected())


@pytest.mark.parametrize("num_requests", (1, 8))
def test_sinks_count_once_however_the_keys_are_split(num_requests: int) -> None:
    batch = Batch([(1, 37 + 300 * r) for r in range(num_requests)], 9, 3, 64, has_sinks=True)
    assert_close(batch.attend(4096), batch.expected())


def test_sinks_leave_zeros_where_there_are_no_keys() -> None:
    batch = Batch([(40, 60), (3, 0), (1, 0), (1, 9)], num_padding=5, has_sinks=True)
    assert_close(batch.attend(), batch.expected())


# A type of the query, whether the cache is FP8, a block size: each pair of them is there.
CACHES = [
    *((DTYPES[0], False, 16), (DTYPES[-1], True, 16), (DTYPES[-1], False, 32)),
    *((DTYPES[0], True, 32), (DTYPES[0], False, 64), (DTYPES[-1], True, 64)),
]


@pytest.mark.parametrize("requests", (DECODES, CHUNKS), ids=("decode", "mixed"))
@pytest.mark.parametrize("dtype, is_fp8, block_size", CACHES, ids=str)
def test_caches_of_every_type(dtype: torch.dtype, is_fp8: bool, block_size: int, requests: list):
    options = {"cache_dtype": FP8, "scales": (0.03, 0.05)} if is_fp8 else {}
    batch = Batch(requests, dtype=dtype, block_size=block_size, **options)
    assert_close(batch.attend(), batch.expected())


@pytest.mark.parametrize("max_seq_len", (100, 1000, 40960))
def test_decoding_is_right_for_any_bound_on_the_keys(max_seq_len: int) -> None:
    batch = Batch([(1, 100), (1, 3), (1, 96)])
    assert_close(batch.attend(max_seq_len), batch.expected())


@pytest.mark.parametrize("num_requests", (1, 8, pytest.param(150, marks=needs_gpu)))
def test_decoding_is_right_for_any_number_of_splits(num_requests: int) -> None:
    batch = Batch([(1, 37 + r) for r in range(num_requests)], 4, 2, 64)
    assert_close(batch.attend(4096), batch.expected())


def test_one_long_request_among_many_is_split() -> None:
    num_others = 6 if IS_INTERPRETED else 140  # whose programs fill the chip
    batch = Batch([(1, 37 + r % 50) for r in range(num_others)] + [(1, 9001)], 4, 2, 64)
    assert_close(batch.attend(20000), batch.expected())


def test_splits_add_up_to_the_same_bits_at_every_call() -> None:
    batch = Batch([(1, 900), (1, 0), (1, 3), (1, 4000)], 4, 2, 64)
    first = batch.attend(40960).clone()
    assert_close(first, batch.expected())
    for _ in range(2 if IS_INTERPRETED else 200):
        assert torch.equal(batch.attend(40960), first)
    assert not kernels.arrival_counters(first.device).any()


class Allocations(TorchDispatchMode):
    """The shapes of what `new_empty` made."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.new_empty.default:
            self.shapes.append(tuple(result.shape))
        return result


@pytest.mark.parametrize("parts", (0, 1, 3))
def test_partial_results_take_no_more_memory_than_there_is(parts: int, monkeypatch) -> None:
    """Of two requests of 4 heads of 64, as many parts as there is room for; one needs none."""
    monkeypatch.setattr(kernels, "PARTIAL_BYTES", parts * 4 * 2 * 4 * 64)
    batch = Batch([(1, 900), (1, 5000)], 4, 2, 64)
    with Allocations() as made:
        out = batch.attend(40960)
    assert [shape for shape in made.shapes if len(shape) == 4] == [(2, 4, parts, 64)] * (parts > 1)
    assert_close(out, batch.expected())


@pytest.mark.parametrize("window", (0, 50))
def test_prompts_that_fill_the_chip(window: int) -> None:
    num_requests, num_heads, num_kv_heads = (1, 4, 2) if IS_INTERPRETED else (12, 32, 8)
    num_sms = kernels.read_chip(torch.zeros(1, device=DEVICE).device).num_sms
    assert 190 * num_requests // 32 * num_kv_heads >= 2 * num_sms
    batch = Batch([(190, 333)] * num_requests, num_heads, num_kv_heads, window=window)
    assert_close(batch.attend(), batch.expected())


@pytest.mark.parametrize("shared_memory", (101376, 166912, 232448))
@pytest.mark.parametrize("kind", kernels.PREFILL_TILES)
def test_tiles_fit_the_chip(kind: tuple[int, int], shared_memory: int) -> None:
    few, many = kernels.prefill_tiles(kind, shared_memory)
    assert few.shared_memory(*kind) <= shared_memory
    assert few == many or 2 * many.shared_memory(*kind) <= shared_memory


@pytest.mark.parametrize(
    "requests",
    (
        [(1, 20), (1, 0), (1, 300), (1, 0)],
        [(1, 20), (0, 0), (1, 30), (0, 50)],
        [(0, 0)],
        [(40, 60), (3, 0), (0, 0), (1, 0), (1, 9), (33, 33), (0, 7)],
    ),
)
@pytest.mark.parametrize("num_padding", (0, 1, 50))
def test_rows_without_keys_become_zeros(requests: list, num_padding: int) -> None:
    batch = Batch(requests, num_padding=num_padding)
    out, expected = batch.attend(), batch.expected()
    assert_close(out, expected)
    is_empty = (expected == 0).flatten(1).all(1)
    assert int(is_empty.sum()) >= num_padding
    assert not out[is_empty].any()


@pytest.mark.parametrize("num_requests", (1, 5))
def test_a_prompt_in_chunks_gives_what_it_gives_at_once(num_requests: int) -> None:
    whole = Batch([(200, 200)] * num_requests)
    expected = whole.expected().unflatten(0, (num_requests, 200))
    for begin, end in ((0, 64), (64, 65), (65, 199), (199, 200)):
        query = whole.query.unflatten(0, (num_requests, 200))[:, begin:end].flatten(0, 1)
        out = kernels.paged_attention(
            query,
            whole.k_cache,
            whole.v_cache,
            whole.tables,
            torch.arange(num_requests + 1, device=DEVICE).int() * (end - begin),
            torch.full_like(whole.lens, end),
            whole.scale,
            max_query_len=end - begin,
            max_seq_len=end,
        )
        assert_close(out, expected[:, begin:end].flatten(0, 1))


def test_large_scores_do_not_overflow() -> None:
    batch = Batch(CHUNKS)
    batch.scale = 40.0
    assert_close(batch.attend(), batch.expected())


@needs_gpu
@pytest.mark.parametrize("query_len, rows", ((1, ()), (3, ()), (3, kernels.VERIFY_ROWS)))
def test_a_captured_graph_serves_other_lengths(query_len: int, rows, monkeypatch) -> None:
    """rows: without them several new tokens are the prompts' kernel's."""
    monkeypatch.setattr(kernels, "VERIFY_ROWS", rows)
    longest = [(query_len, 2000)] * 6
    batch = Batch(longest, num_padding=2)
    out = poisoned(tuple(batch.query.shape), batch.query.dtype)
    batch.attend(out=out)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.attend(out=out)
    for lens in ((2000,) * 6, (3, 16, 17, 700, 1999, 4), (5, 0, 0, 3, 0, 0), (64,) * 5):
        later = Batch([(query_len, n) for n in lens], num_padding=8 * query_len)
        num_rows, num_requests = batch.query.shape[0], len(lens)
        batch.query.copy_(later.query[:num_rows])
        batch.k_cache.fill_(float("nan"))
        batch.v_cache.fill_(float("nan"))
        batch.k_cache[: len(later.k_cache)] = later.k_cache
        batch.v_cache[: len(later.v_cache)] = later.v_cache
        batch.tables.fill_(len(batch.k_cache) - 1)
        batch.tables[:num_requests, : later.tables.shape[1]] = later.tables
        batch.lens.zero_()[:num_requests] = later.lens
        batch.starts.fill_(int(later.starts[-1]))[: num_requests + 1] = later.starts
        out.fill_(float("nan"))
        graph.replay()
        expected = later.expected()[:num_rows]
        assert_close(out, expected)
        assert not out[(expected == 0).flatten(1).all(1)].any()


# ---------------------------------------------------------------- cache writes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_fp8", (False, pytest.param(True, marks=needs_gpu)))
@pytest.mark.parametrize("num_kv_heads,dim", ((1, 64), (3, 80), (8, 128), (2, 256)))
def test_written_bytes_are_exact(is_fp8: bool, dtype: torch.dtype, num_kv_heads: int, dim: int):
    cache_dtype, scales = (FP8, (0.003, 0.7)) if is_fp8 else (dtype, (1.0, 1.0))
    num_tokens, num_blocks = 70, 9
    slots = torch.randperm(num_blocks * 16, device=DEVICE)[:num_tokens]
    slots[::7] = -1
    qkv = torch.randn(num_tokens, 4 + 2 * num_kv_heads, dim, device=DEVICE).to(dtype)
    qkv[3, :, :5] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0])
    key, value = qkv[:, 4 : 4 + num_kv_heads], qkv[:, 4 + num_kv_heads :]
    shape = (num_blocks, 16, num_kv_heads, dim)
    caches = [poisoned(shape, cache_dtype) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    kernels.reshape_and_cache(key, value, *caches, slots, *scales)
    is_kept = slots >= 0
    for cache, other, x, scale in zip(caches, expected, (key, value), scales, strict=True):
        write_bytes(other, slots[is_kept], encode(x[is_kept], scale, cache_dtype).contiguous())
        cache, other = cache.float(), other.float()
        assert torch.equal(cache.isnan(), other.isnan())
        assert torch.equal(cache.nan_to_num(0.0), other.nan_to_num(0.0))


def test_no_tokens_are_no_error() -> None:
    batch = Batch([(1, 4)])
    empty = batch.query[:0]
    out = kernels.paged_attention(
        empty, batch.k_cache, batch.v_cache, batch.tables[:0], batch.starts[:1], batch.lens[:0],
        1.0, max_query_len=1, max_seq_len=1,
    )  # fmt: skip
    assert out.shape == empty.shape
    kernels.reshape_and_cache(
        empty[:, :2], empty[:, :2], batch.k_cache, batch.v_cache, batch.starts[:0].long()
    )
