"""Paged attention and cache writes against the torch reference, and bit for bit against itself."""

import math

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import ISAS, use_isa
from vllm.ops import cpu_ops, torch_ops
from vllm.platforms import native

E4M3 = torch.float8_e4m3fn
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CACHE_DTYPES = (*FLOAT_DTYPES, E4M3)


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Sequences:
    """Whole sequences in a paged cache with shuffled blocks, NaN wherever no token was written."""

    def __init__(
        self,
        lens: list[int],
        num_heads: int = 3,
        num_kv_heads: int = 1,
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        self.lens, self.block_size, self.scales = lens, block_size, scales
        self.softmax_scale = 1 / math.sqrt(head_dim)
        self.queries = [torch.randn(n, num_heads, head_dim) for n in lens]
        blocks = [-(-n // block_size) for n in lens]
        num_blocks = sum(blocks) + 3
        shuffled = torch.randperm(num_blocks, dtype=torch.int32)
        self.tables = torch.full((len(lens), max(blocks) + 1), -1, dtype=torch.int32)
        for r, (count, ids) in enumerate(zip(blocks, shuffled[:-3].split(blocks), strict=True)):
            self.tables[r, :count] = ids
        nan = torch.full((num_blocks, num_kv_heads, head_dim, block_size), float("nan"))
        self.k_cache = nan.to(dtype)
        self.v_cache = nan.transpose(2, 3).contiguous().to(dtype)
        for r, n in enumerate(lens):
            key, value = torch.randn(2, n, num_kv_heads, head_dim)
            torch_ops.reshape_and_cache(
                key, value, self.k_cache, self.v_cache, self.slots(r, 0, n), *scales
            )

    def slots(self, request: int, begin: int, end: int) -> Tensor:
        position = torch.arange(begin, end)
        block = self.tables[request].long()[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def arguments(self, spans: list[tuple[int, int, int]]) -> dict[str, object]:
        """The call in which request r computes positions [begin, end), for each (r, begin, end)."""
        lengths = [end - begin for _, begin, end in spans]
        return {
            "query": torch.cat([self.queries[r][begin:end] for r, begin, end in spans]),
            "k_cache": self.k_cache,
            "v_cache": self.v_cache,
            "block_tables": self.tables[[r for r, _, _ in spans]],
            "query_start_loc": int32([0, *torch.tensor(lengths).cumsum(0).tolist()]),
            "seq_lens": int32([end for _, _, end in spans]),
            "scale": self.softmax_scale,
            "k_scale": self.scales[0],
            "v_scale": self.scales[1],
        }

    def whole(self, request: int, **options: object) -> Tensor:
        return cpu_ops.paged_attention(
            **self.arguments([(request, 0, self.lens[request])]), **options
        )


def assert_close(given: Tensor, expected: Tensor) -> None:
    eps = torch.finfo(given.dtype).eps
    torch.testing.assert_close(given, expected, atol=max(3e-6, 2 * eps), rtol=4 * eps)


@pytest.mark.parametrize("head_dim", (8, 40, 64, 80, 96, 128, 256))
@pytest.mark.parametrize("num_heads,num_kv_heads", ((2, 2), (9, 3), (8, 1)))
def test_heads_and_groups_of_every_size(isa, head_dim, num_heads, num_kv_heads):
    sequences = Sequences([1, 150, 37], num_heads, num_kv_heads, head_dim)
    arguments = sequences.arguments([(0, 0, 1), (1, 149, 150), (2, 10, 37)])
    out = torch.full_like(arguments["query"], float("nan"))
    assert cpu_ops.paged_attention(**arguments, out=out) is out
    assert_close(out, torch_ops.paged_attention(**arguments))


@pytest.mark.parametrize("block_size", (16, 32, 48))
@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
def test_caches_of_every_type(isa, dtype, block_size):
    scales = (0.03, 0.05) if dtype == E4M3 else (1.0, 1.0)
    sequences = Sequences([300, 5, 129], 9, 3, 64, block_size, dtype, scales)
    arguments = sequences.arguments([(0, 200, 300), (1, 4, 5), (2, 128, 129)])
    assert_close(cpu_ops.paged_attention(**arguments), torch_ops.paged_attention(**arguments))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_half_precision_queries(isa, dtype):
    sequences = Sequences([140], 9, 3)
    arguments = sequences.arguments([(0, 100, 140)])
    arguments["query"] = arguments["query"].to(dtype)
    out = cpu_ops.paged_attention(**arguments)
    assert out.dtype == dtype
    assert_close(out, torch_ops.paged_attention(**arguments))


@pytest.mark.parametrize("window", (1, 5, 128, 130, 1000))
def test_a_sliding_window_hides_older_keys(isa, window):
    sequences = Sequences([400, 290], 6, 2)
    arguments = sequences.arguments([(0, 250, 400), (1, 289, 290)])
    arguments["sliding_window"] = window
    assert_close(cpu_ops.paged_attention(**arguments), torch_ops.paged_attention(**arguments))


@pytest.mark.parametrize("chunk", (1, 5, 128, 130, 1000))
def test_queries_see_the_keys_of_their_own_chunk(isa, chunk):
    sequences = Sequences([400, 290], 6, 2)
    arguments = sequences.arguments([(0, 250, 400), (1, 289, 290)])
    arguments |= {"sliding_window": chunk, "is_chunked": True}
    given = cpu_ops.paged_attention(**arguments)
    assert_close(given, torch_ops.paged_attention(**arguments))
    # The first query of a chunk sees itself alone; the last of one sees all of a window's keys.
    alone = cpu_ops.paged_attention(**arguments | {"sliding_window": 1, "is_chunked": False})
    windowed = cpu_ops.paged_attention(**arguments | {"is_chunked": False})
    for row, position in enumerate(range(250, 400)):
        if position % chunk == 0 and position:
            assert_close(given[row], alone[row])
        if position % chunk == chunk - 1:
            assert_close(given[row], windowed[row])


def test_a_chunk_of_no_positions_is_refused():
    sequences = Sequences([40], 2, 2)
    with pytest.raises(ValueError, match="sliding_window: given 0; accepted with is_chunked"):
        sequences.whole(0, is_chunked=True)


def test_a_window_of_one_returns_the_value_of_the_token_itself(isa):
    sequences = Sequences([200], 3, 1)
    out = sequences.whole(0, sliding_window=1)
    slots = sequences.slots(0, 0, 200)
    values = sequences.v_cache[slots // 16, 0, slots % 16]
    assert torch.equal(out, values.unsqueeze(1).expand_as(out))


@pytest.mark.parametrize("window", (0, 5, 130))
@pytest.mark.parametrize("group", (1, 3, 8))
def test_scores_are_soft_capped(isa, group, window):
    """Stale keys, whose scores may be anything, are still not seen."""
    sequences = Sequences([400, 290, 1], 2 * group, 2)
    arguments = sequences.arguments([(0, 250, 400), (1, 289, 290), (2, 0, 1)])
    arguments |= {"sliding_window": window, "softcap": 1.5}
    arguments["scale"] *= 4
    given = cpu_ops.paged_attention(**arguments)
    assert_close(given, torch_ops.paged_attention(**arguments))
    without = cpu_ops.paged_attention(**arguments | {"softcap": 0.0})
    assert not torch.allclose(given, without, atol=0.1)


def test_a_cap_far_above_all_scores_changes_almost_nothing(isa):
    sequences = Sequences([70], 4, 2)
    torch.testing.assert_close(
        sequences.whole(0, softcap=1000.0), sequences.whole(0), atol=2e-3, rtol=0
    )


@pytest.mark.parametrize("softcap", (-1.0, float("inf"), float("nan")))
def test_a_cap_that_is_none_is_refused(softcap):
    sequences = Sequences([40], 2, 1)
    with pytest.raises(ValueError, match="softcap"):
        sequences.whole(0, softcap=softcap)


@pytest.mark.parametrize("window", (0, 5, 130))
@pytest.mark.parametrize("group", (1, 3, 8))
def test_sinks_take_their_share_of_the_weights(isa, group, window):
    sequences = Sequences([400, 290, 1], 2 * group, 2)
    arguments = sequences.arguments([(0, 250, 400), (1, 289, 290), (2, 0, 1)])
    arguments |= {"sliding_window": window, "sinks": torch.randn(2 * group) * 3}
    given = cpu_ops.paged_attention(**arguments)
    assert_close(given, torch_ops.paged_attention(**arguments))
    without = cpu_ops.paged_attention(**arguments | {"sinks": None})
    assert (given.norm(dim=-1) < without.norm(dim=-1)).all()


def test_a_sink_of_the_size_of_the_only_key_halves_its_value(isa):
    sequences = Sequences([1], 2, 1)
    query, block = sequences.queries[0], int(sequences.tables[0, 0])
    scores = (query[0] @ sequences.k_cache[block, 0, :, 0]) * sequences.softmax_scale
    value = sequences.v_cache[block, 0, 0]
    assert_close(sequences.whole(0, sinks=scores), (value / 2).expand(1, 2, -1))


def test_sinks_of_any_size_leave_finite_results(isa):
    sequences = Sequences([40], 2, 1)
    assert torch.equal(sequences.whole(0, sinks=torch.full((2,), -3e38)), sequences.whole(0))
    assert_close(sequences.whole(0, sinks=torch.full((2,), 3e38)), torch.zeros(40, 2, 64))


def test_sinks_of_the_wrong_length_are_refused():
    sequences = Sequences([40], 2, 1)
    with pytest.raises(ValueError, match="sinks"):
        sequences.whole(0, sinks=torch.zeros(3))


CHUNKS = (1, 7, 64, 129)


@pytest.mark.parametrize("window", (0, 100))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, E4M3), ids=str)
@pytest.mark.parametrize("group", (1, 3, 8))
def test_a_chunked_prompt_has_the_bits_of_a_whole_one(isa, group, dtype, window):
    sequences = Sequences([330], 2 * group, 2, 64, 16, dtype)
    whole = sequences.whole(0, sliding_window=window)
    assert whole.isfinite().all()
    for chunk in CHUNKS:
        starts = range(0, 330, chunk) if chunk > 1 else (0, 15, 16, 127, 128, 129, 329)
        for begin in starts:
            end = min(begin + chunk, 330)
            arguments = sequences.arguments([(0, begin, end)])
            part = cpu_ops.paged_attention(**arguments, sliding_window=window)
            assert torch.equal(part, whole[begin:end]), (chunk, begin)


@pytest.mark.parametrize("head_dim", (40, 64, 128))
def test_a_request_has_the_same_bits_in_every_batch(isa, head_dim):
    lens = [1, 300, 17, 128, 129, 260]
    sequences = Sequences(lens, 9, 3, head_dim)
    alone = [sequences.whole(r) for r in range(len(lens))]
    decode = [(r, n - 1, n) for r, n in enumerate(lens)]
    mixed = [(1, 100, 300), (4, 128, 129), (0, 0, 1), (5, 3, 40), (3, 127, 128), (2, 0, 17)]
    for spans in (decode, mixed, mixed[::-1], decode[:3], mixed[3:] + decode[1:2]):
        out = cpu_ops.paged_attention(**sequences.arguments(spans))
        expected = torch.cat([alone[r][begin:end] for r, begin, end in spans])
        assert torch.equal(out, expected)


def test_a_batch_of_forty_decodes_has_the_bits_of_single_ones(isa):
    lens = torch.randint(1, 400, (40,)).tolist()
    sequences = Sequences(lens, 9, 3)
    spans = [(r, n - 1, n) for r, n in enumerate(lens)]
    single = torch.cat([cpu_ops.paged_attention(**sequences.arguments([s])) for s in spans])
    for count in (1, 2, 3, 8, 40):
        out = cpu_ops.paged_attention(**sequences.arguments(spans[:count]))
        assert torch.equal(out, single[:count])


def test_bits_do_not_depend_on_the_block_size(isa):
    results = []
    for block_size in (16, 32, 128):
        torch.manual_seed(1)
        sequences = Sequences([1, 300], 3, 1, 64, 16)
        order = sequences.slots(1, 0, 300)
        keys = sequences.k_cache[order // 16, :, :, order % 16]
        values = sequences.v_cache[order // 16, :, order % 16]
        num_blocks = -(-300 // block_size)
        sequences.block_size = block_size
        sequences.tables = torch.randperm(num_blocks, dtype=torch.int32).expand(2, -1).contiguous()
        sequences.k_cache = torch.full((num_blocks, 1, 64, block_size), float("nan"))
        sequences.v_cache = torch.full((num_blocks, 1, block_size, 64), float("nan"))
        slots = sequences.slots(1, 0, 300)
        cpu_ops.reshape_and_cache(keys, values, sequences.k_cache, sequences.v_cache, slots)
        results.append(sequences.whole(1))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("threads", (1, 2, 5))
def test_bits_do_not_depend_on_the_number_of_threads(num_threads, threads):
    sequences = Sequences([1000, 130], 9, 3)
    spans = ([(0, 999, 1000)], [(0, 500, 1000), (1, 129, 130)])
    native.load().cpu_set_num_threads(4)
    expected = [cpu_ops.paged_attention(**sequences.arguments(s)) for s in spans]
    native.load().cpu_set_num_threads(threads)
    for span, result in zip(spans, expected, strict=True):
        for _ in range(20):
            out = cpu_ops.paged_attention(**sequences.arguments(span))
            assert torch.equal(out, result)


def test_avx512_and_avx2_give_the_same_bits():
    sequences = Sequences([300, 64], 9, 3)
    default = native.load().cpu_isa()
    results = []
    for name in ISAS[:2]:
        use_isa(name)
        arguments = sequences.arguments([(0, 100, 300), (1, 63, 64)])
        results.append(cpu_ops.paged_attention(**arguments))
    native.load(default)
    assert torch.equal(*results)


def test_query_and_output_may_be_slices_of_wider_rows(isa):
    sequences = Sequences([50], 9, 3)
    expected = sequences.whole(0)
    arguments = sequences.arguments([(0, 0, 50)])
    qkv = torch.full((50, 15, 64), float("nan"))
    qkv[:, :9] = arguments["query"]
    arguments["query"] = qkv[:, :9]
    out = torch.full((50, 12, 80), float("nan"))
    cpu_ops.paged_attention(**arguments, out=out[:, 2:11, 8:72])
    assert torch.equal(out[:, 2:11, 8:72], expected)
    assert out.isnan().sum() == out.numel() - expected.numel()


def test_large_scores_do_not_overflow(isa):
    sequences = Sequences([200], 3, 1)
    arguments = sequences.arguments([(0, 150, 200)])
    arguments["query"] *= 1e4
    out = cpu_ops.paged_attention(**arguments)
    assert out.isfinite().all()
    torch.testing.assert_close(out, torch_ops.paged_attention(**arguments), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("ops", (cpu_ops, torch_ops), ids=("cpu", "torch"))
def test_requests_of_no_keys_fill_up_a_batch_with_zeros(isa, ops):
    sequences = Sequences([140, 5], 6, 2)
    alone = sequences.arguments([(0, 139, 140), (1, 4, 5)])
    filled = sequences.arguments([(0, 139, 140), (1, 4, 5), (0, 0, 1), (0, 0, 1)])
    filled["seq_lens"][2:] = 0
    out = torch.full_like(filled["query"], float("nan"))
    ops.paged_attention(**filled, out=out)
    assert torch.equal(out[:2], ops.paged_attention(**alone))
    assert torch.equal(out[2:], torch.zeros_like(out[2:]))


def test_requests_without_query_tokens_are_skipped(isa):
    sequences = Sequences([20, 30], 3, 1)
    arguments = sequences.arguments([(0, 0, 20), (1, 30, 30)])
    assert torch.equal(cpu_ops.paged_attention(**arguments), sequences.whole(0))
    arguments = sequences.arguments([(1, 30, 30)])
    assert cpu_ops.paged_attention(**arguments).shape == (0, 3, 64)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", (8, 64, 72))
def test_cache_writes_equal_the_reference_bit_for_bit(isa, head_dim, cache_dtype, dtype):
    scales = (0.013, 0.5) if cache_dtype == E4M3 else (1.0, 1.0)
    key, value = (torch.randn(2, 90, 3, head_dim) * 10).to(dtype)
    slots = torch.randperm(7 * 16)[:90]
    slots[::7] = -1
    caches = []
    for ops in (cpu_ops, torch_ops):
        k_cache = torch.zeros(7, 3, head_dim, 16).to(cache_dtype)
        v_cache = torch.zeros(7, 3, 16, head_dim).to(cache_dtype)
        ops.reshape_and_cache(key, value, k_cache, v_cache, slots, *scales)
        caches.append(torch.cat((k_cache.float().flatten(), v_cache.float().flatten())))
    assert torch.equal(*caches)
    assert caches[0].count_nonzero() > 0.9 * (slots >= 0).sum() * 2 * 3 * head_dim


def test_e4m3_writes_round_to_nearest_even_and_saturate(isa):
    finite = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    middle = (finite[1:] + finite[:-1]) / 2
    above = torch.nextafter(middle, torch.tensor(1e9))
    below = torch.nextafter(middle, torch.tensor(-1e9))
    extreme = torch.tensor([449.0, 1e9, float("inf"), 2.0**-10, 2.0**-30, 0.0])
    values = torch.cat((finite, middle, above, below, extreme))
    values = torch.cat((values, -values))
    values = torch.nn.functional.pad(values, (0, -len(values) % 8)).view(1, -1, 8)
    k_cache = torch.zeros(1, values.shape[1], 8, 16).to(E4M3)
    v_cache = torch.zeros(1, values.shape[1], 16, 8).to(E4M3)
    cpu_ops.reshape_and_cache(values, values, k_cache, v_cache, torch.tensor([5]))
    expected = values[0].clamp(-448, 448).to(E4M3).view(torch.uint8)
    assert torch.equal(k_cache[0, :, :, 5].view(torch.uint8), expected)
    assert torch.equal(v_cache[0, :, 5].view(torch.uint8), expected)
