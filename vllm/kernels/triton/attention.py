"""Paged attention and cache writes in Triton, for GPUs.

The cache is `k_cache` and `v_cache` [num_blocks, block_size, num_kv_heads, head_dim], contiguous,
in the type of the query or in float8_e4m3fn (value = stored * scale). A request's key at position
p lies in slot p % block_size of block `block_tables[request, p // block_size]`.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from vllm.kernels.triton.attention_kernels import decode_kernel, write_kernel
from vllm.kernels.triton.moe_rows import launch_dependent
from vllm.kernels.triton.prefill_kernels import prefill_kernel
from vllm.utils.math_utils import cdiv, next_power_of_2

LOG2_E = math.log2(math.e)
FP8 = torch.float8_e4m3fn


class Tile(NamedTuple):
    """Rows of queries and of keys, and Triton's launch options.

    max_registers: of a thread, where two programs are to share an SM.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    def shared_memory(self, head_dim: int, cache_bytes: int) -> int:
        """Bytes of the query tile and of the K and V tiles in flight."""
        cached = self.num_stages * 2 * self.block_n * head_dim * cache_bytes
        return 2 * self.block_m * head_dim + cached

    def options(self) -> dict[str, int | None]:
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.max_registers,
        }


# By padded head size and bytes of an element of the cache, best first: the first that fits the
# chip's shared memory is taken.
PREFILL_TILES = {
    (64, 2): (Tile(128, 64, 8, 3), Tile(64, 64, 4, 2)),
    (128, 2): (Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(128, 64, 8, 2)),
    (256, 2): (Tile(128, 64, 8, 2), Tile(64, 32, 4, 2)),
    (64, 1): (Tile(128, 64, 4, 3), Tile(64, 64, 4, 2)),
    (128, 1): (Tile(128, 128, 8, 4), Tile(128, 128, 8, 3), Tile(128, 64, 8, 2)),
    (256, 1): (Tile(128, 64, 8, 2), Tile(64, 32, 4, 2)),
}
# Where every SM gets two programs: one computes scores while the other computes a softmax.
PAIRED_TILES = {(128, 2): Tile(128, 64, 8, 2, max_registers=128)}
DECODE_TILE_BYTES = 16384  # of K, and of V
DECODE_STAGES = {1: 3, 2: 2}  # by bytes of an element of the cache
COMBINED_BYTES = 16384  # of partial results that are fetched at a time
# Where requests have several new tokens: rows of the tiles that `decode_kernel` is compiled for,
# the most tokens, and sums of values that a thread of 128 has room for. The last program to arrive
# fetches the results of all tokens alone: it takes more at a time, and splits have several keys for
# each of their rows. Registers let an SM have four programs, as with one token; E4M3 needs more.
VERIFY_ROWS, MAX_QUERIES, MAX_SUMS = (16, 32, 64), 16, 64
VERIFY_COMBINED_BYTES, KEYS_PER_ROW = 32768, 8
VERIFY_REGISTERS = {(16, 2): 128}  # by rows and bytes of an element of the cache
MAX_SPLITS = 128
SHORT_SPLIT, LONG_SPLIT = 128, 8192
PARTIAL_BYTES = 256 << 20  # of all partial results of a call, more of which no graph has room for
NUM_COUNTERS = 65536


class Chip(NamedTuple):
    num_sms: int
    shared_memory: int


@cache
def read_chip(device: torch.device) -> Chip:
    """Multiprocessors, and bytes of shared memory that a program can have."""
    if device.type == "cpu":  # Triton's interpreter
        return Chip(num_sms=2, shared_memory=232448)
    found = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return Chip(found["multiprocessor_count"], found["max_shared_mem"])


@cache
def arrival_counters(device: torch.device) -> Tensor:
    """Zeros that the decode kernel counts in and leaves zero.

    One tensor for all calls and captured graphs, so calls on a device must not run at the same
    time on several streams.
    """
    return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


def plan_splits(
    programs: int,
    max_seq_len: int,
    num_sms: int,
    most: int = MAX_SPLITS,
    least: int = SHORT_SPLIT,
) -> tuple[int, int]:
    """In how many parts the keys of a request are cut at most, and the fewest keys of a part.

    `programs`: requests times K and V heads. `most`: parts that there is memory for. `least`: keys
    that are worth a part. Few programs are cut into short parts, until every SM has two; many are
    cut only where a single long request would keep all others waiting. The kernel cuts the keys
    that a request has at run time: a large `max_seq_len` (that of a captured graph) costs programs
    that end at once, no more.
    """
    if programs > NUM_COUNTERS:
        return 1, least
    wanted = cdiv(2 * num_sms, programs)
    min_split = least if wanted > 1 else max(least, LONG_SPLIT // 4)
    wanted = max(wanted, cdiv(max_seq_len, LONG_SPLIT))
    return max(1, min(wanted, cdiv(max_seq_len, min_split), most, MAX_SPLITS)), min_split


def verify_queries(group: int, dim_pad: int) -> list[int]:
    """How many new tokens of a request each tile for several has room for, ascending.

    group: query heads to a K and V head, dim_pad: padded head size. They are few, since each is
    compiled: tiles of 16 rows, the fewest that are multiplied, and of twice and four times as many.
    """
    rows = [n for n in VERIFY_ROWS if n * dim_pad <= MAX_SUMS * 128]
    return sorted({min(n // group, MAX_QUERIES) for n in rows if n >= 2 * group})


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    is_chunked: bool = False,
    *,
    max_query_len: int,
    max_seq_len: int,
) -> Tensor:
    """Causal attention of query [T, heads, head_dim] over the paged cache, as the query's type.

    block_tables int32 [R, max blocks], query_start_loc int32 [R + 1], seq_lens int32 [R]: the last
    query_len of a request's seq_len keys belong to its new tokens. Rows of requests of no keys,
    and those past query_start_loc[R], become zeros. `sinks` float32 [heads]: of each head the logit
    of a key without a value, which every query sees. `max_query_len` and `max_seq_len` bound what
    is in these tensors and choose the grid; all else is read on the device, so that a captured
    graph serves other lengths within the bounds. `softcap`: scaled scores become softcap *
    tanh(score / softcap), 0 for none. `is_chunked`: a query sees the keys of its own chunk of
    sliding_window positions. Memory for partial results comes from torch's
    allocator at each call: a captured graph has its own.

    Where all requests have few new tokens (`verify_queries`), as in steps that verify draft tokens,
    `decode_kernel` serves all. Otherwise requests of several are `prefill_kernel`'s, which does not
    split keys: a result differs by rounding.
    """
    out = torch.empty_like(query) if out is None else out
    if query.shape[0] == 0:
        return out
    call = _Call(
        out, query, k_cache, v_cache, block_tables, query_start_loc, seq_lens,
        *score_scales(scale * k_scale, softcap), v_scale, sliding_window, sinks, is_chunked,
    )  # fmt: skip
    has_others = seq_lens.shape[0] > 1
    sizes = call.sizes()
    choices = [1, *verify_queries(sizes["GROUP"], sizes["DIM_PAD"])]
    queries = next((n for n in choices if n >= max_query_len), None)
    if queries is None:
        _prefill(call, min_query_len=2 if has_others else 1)
    if queries or has_others:
        _decode(call, queries or 1, max_seq_len, choices)
    return out


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Writes key and value [T, num_kv_heads, head_dim] into slots (int64 [T]) of the cache.

    Tokens of negative slots are skipped. Rows of a head must be contiguous, heads and tokens need
    not: views of a qkv tensor will do.
    """
    num_tokens, num_heads, dim = key.shape
    if num_tokens == 0:
        return
    assert key.stride(2) == 1 and value.stride(2) == 1
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    row = num_heads * dim
    write_kernel[(num_tokens,)](
        key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale,
        *key.stride()[:2], *value.stride()[:2],
        DIM=dim, ROW=row, ROW_PAD=next_power_of_2(row),
        LIMIT=torch.finfo(FP8).max if k_cache.dtype == FP8 else 0.0,
    )  # fmt: skip


def score_scales(scale: float, softcap: float) -> tuple[float, float | None]:
    """What the kernels multiply a score with, and the bound that it then has, in powers of two: the
    first brings it to twice the argument of the tanh where there is one."""
    if not softcap:
        return scale * LOG2_E, None
    return 2 * scale / softcap * LOG2_E, softcap * LOG2_E


class _Call(NamedTuple):
    out: Tensor
    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    qk_scale: float
    softcap: float | None
    v_scale: float
    sliding_window: int
    sinks: Tensor | None
    is_chunked: bool

    def sizes(self) -> dict[str, int]:
        """Constants that both kernels are compiled for."""
        _, block_size, num_kv_heads, dim = self.k_cache.shape
        assert self.query.stride(2) == 1 and self.out.stride(2) == 1
        assert self.k_cache.is_contiguous() and self.v_cache.is_contiguous()
        return {
            "KV_HEADS": num_kv_heads,
            "GROUP": self.query.shape[1] // num_kv_heads,
            "DIM": dim,
            "DIM_PAD": max(64, next_power_of_2(dim)),
            "BLOCK_SIZE": block_size,
        }

    def is_new(self, kernel: str) -> bool:
        """Whether this is the first call on a GPU of what has to be compiled by itself."""
        parts = self.softcap is not None, self.sinks is not None, self.is_chunked
        types = self.query.dtype, self.k_cache.dtype, self.query.device
        key = (kernel, *types, *parts, *self.sizes().values())
        if not self.query.is_cuda or key in _compiled:
            return False
        _compiled.add(key)
        return True


_compiled: set[tuple[object, ...]] = set()


def _prefill(call: _Call, min_query_len: int) -> None:
    """Compiles for many programs and for few at the first call of either."""
    query, sizes = call.query, call.sizes()
    kind = sizes["DIM_PAD"], call.k_cache.itemsize
    chip = read_chip(query.device)
    few, many = prefill_tiles(kind, chip.shared_memory)
    num_requests = call.seq_lens.shape[0]

    def arguments(tile: Tile) -> tuple[int, tuple[object, ...]]:
        """The number of programs, and what the kernel takes."""
        num_tiles = query.shape[0] // (tile.block_m // sizes["GROUP"]) + num_requests
        values = (
            *call, query.shape[0], num_requests, num_tiles, call.block_tables.stride(0),
            min_query_len, *query.stride()[:2], *call.out.stride()[:2],
        )  # fmt: skip
        return num_tiles * sizes["KV_HEADS"], values

    tile, other = many, few
    num_programs, values = arguments(many)
    if num_programs < 2 * chip.num_sms:
        tile, other = few, many
        num_programs, values = arguments(few)
    prefill_kernel[(num_programs,)](*values, **sizes, **tile.options())
    if few != many and call.is_new("prefill"):
        prefill_kernel.warmup(*arguments(other)[1], grid=(1,), **sizes, **other.options())


def prefill_tiles(kind: tuple[int, int], shared_memory: int) -> tuple[Tile, Tile]:
    """For few programs, and for enough that every SM gets two; they may be the same.

    kind: padded head size, and bytes of an element of the cache.
    """
    choices, paired = PREFILL_TILES[kind], PAIRED_TILES.get(kind)
    fitting = (tile for tile in choices if tile.shared_memory(*kind) <= shared_memory)
    few = next(fitting, choices[-1])
    if paired is None or 2 * paired.shared_memory(*kind) > shared_memory:
        return few, few
    return few, paired


def _decode(call: _Call, queries: int, max_seq_len: int, choices: list[int]) -> None:
    """Compiles for every number of queries at its first call, so that none is waited for later."""
    grid, values, options = _decode_launch(call, queries, max_seq_len)
    decode_kernel[grid](*values, **options)
    if call.is_new("decode"):
        for other in choices:
            if other != queries:
                grid, values, options = _decode_launch(call, other, max_seq_len=1)
                decode_kernel.warmup(*values, grid=grid, **options)


def _decode_launch(
    call: _Call, queries: int, max_seq_len: int
) -> tuple[tuple[int, int, int], tuple[object, ...], dict[str, object]]:
    """Grid, arguments, and constants with launch options. queries: of the kernel's QUERIES."""
    query, out, sizes = call.query, call.out, call.sizes()
    item, num_requests = call.k_cache.itemsize, len(call.seq_lens)
    group, dim, dim_pad = sizes["GROUP"], sizes["DIM"], sizes["DIM_PAD"]
    chip, num_rows = read_chip(query.device), query.shape[1] * queries
    block_n = min(DECODE_TILE_BYTES // (dim_pad * item), 128)
    num_splits, min_split = plan_splits(
        num_requests * sizes["KV_HEADS"],
        max_seq_len,
        chip.num_sms,
        PARTIAL_BYTES // (4 * num_requests * num_rows * dim),
        SHORT_SPLIT if queries == 1 else max(SHORT_SPLIT, KEYS_PER_ROW * queries * group),
    )
    min_split = cdiv(min_split, block_n) * block_n  # splits are whole tiles
    block_m = max(16, next_power_of_2(queries * group))
    slots = (num_requests, num_rows, num_splits) if num_splits > 1 else (0,)
    partial = query.new_empty((*slots, dim), dtype=torch.float32)
    partial_lse = query.new_empty(slots, dtype=torch.float32)
    row = next_power_of_2(group * dim)
    combined = COMBINED_BYTES if queries == 1 else VERIFY_COMBINED_BYTES
    values = (
        *call, partial, partial_lse, arrival_counters(query.device), query.shape[0],
        call.block_tables.stride(0), min_split, *query.stride()[:2], *out.stride()[:2],
    )  # fmt: skip
    options: dict[str, object] = {
        **sizes,
        "QUERIES": queries,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "ROW_PAD": row,
        "AT_ONCE": min(32, max(1, combined // (4 * row))),
        "num_warps": 4,
        "maxnreg": VERIFY_REGISTERS.get((block_m, item)) if queries > 1 else None,
        "num_stages": decode_stages(item, block_m, dim_pad, chip.shared_memory),
        **launch_dependent(query.device),
    }
    return (sizes["KV_HEADS"], num_requests, num_splits), values, options


def decode_stages(item: int, block_m: int, dim_pad: int, shared_memory: int) -> int:
    """item: bytes of an element of the cache. Tiles of K and V in flight, and beside many rows of
    queries what their products take: chips with 99 KiB have room for fewer."""
    stages = DECODE_STAGES[item]
    needed = 2 * DECODE_TILE_BYTES * stages + 4 * block_m * dim_pad
    return stages if block_m == 16 or needed <= shared_memory else min(stages, 2)
