"""Attention over a paged cache of latents (MLA), and its writes, in Triton, for GPUs.

The cache is [num_blocks, block_size, head_dim], contiguous, in the type of the query or in
float8_e4m3fn (latent = stored * scale); its first value_dim columns are the values.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm.kernels.triton.attention import (
    FP8,
    LOG2_E,
    LONG_SPLIT,
    PARTIAL_BYTES,
    plan_splits,
    read_chip,
)
from vllm.kernels.triton.latent_attention_kernels import (
    combine_kernel,
    decode_kernel,
    prefill_kernel,
    write_kernel,
)
from vllm.kernels.triton.moe_rows import launch_dependent
from vllm.utils.math_utils import cdiv, next_power_of_2

_AT_ONCE = 8  # splits that are added up at a time
# New tokens of each request that `decode_kernel` serves, as of steps that verify draft tokens: with
# more, a prompt's tiles are programs enough.
MAX_QUERIES = 16


class Tile(NamedTuple):
    """Rows of queries and of keys, and Triton's launch options."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def shared_memory(self, head_dim: int, cache_bytes: int) -> int:
        """Bytes of the query tile, keys in flight, and weights. head_dim: with padding."""
        keys = self.num_stages * self.block_n * head_dim * cache_bytes
        widened = 2 * self.block_n * head_dim if cache_bytes == 1 else 0
        return 2 * self.block_m * head_dim + keys + widened + 2 * self.block_m * self.block_n


# By rows, best first: the first that fits the chip's shared memory is taken. Sums of values for 64
# rows take half of an SM's registers.
TILES = {
    16: (Tile(16, 64, 4, 2), Tile(16, 32, 4, 2), Tile(16, 16, 4, 2)),
    32: (Tile(32, 64, 8, 2), Tile(32, 32, 8, 2), Tile(32, 16, 8, 1)),
    64: (Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), Tile(64, 16, 8, 1)),
}
# Of shared memory, for what the compiler needs besides: less where products read both operands
# from there, as on chips with as much as Hopper's.
_MARGIN, _LARGE_MARGIN, _LARGE = 8192, 2048, 200 << 10


def tile_of(num_rows: int, head_dim: int, cache_bytes: int, shared_memory: int) -> Tile:
    """For that many rows, or fewer where the chip has no room for them."""
    rows = min(64, max(16, next_power_of_2(num_rows)))
    shared_memory -= _LARGE_MARGIN if shared_memory > _LARGE else _MARGIN
    while True:
        for tile in TILES[rows]:
            if tile.shared_memory(head_dim, cache_bytes) <= shared_memory:
                return tile
        if rows == 16:
            return TILES[16][-1]
        rows //= 2


def _padded(columns: int) -> int:
    return max(16, next_power_of_2(columns))


def splits_of(programs: int, max_seq_len: int, num_sms: int, most: int) -> tuple[int, int]:
    """As `plan_splits`, but no more than all SMs begin at once: what is left over waits for a place
    of its size, as long as all before it took."""
    at_once = max(2 * num_sms // programs, cdiv(max_seq_len, LONG_SPLIT), 1)
    return plan_splits(programs, max_seq_len, num_sms, min(most, at_once))


def paged_latent_attention(
    query: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    value_dim: int,
    k_scale: float = 1.0,
    *,
    max_query_len: int,
    max_seq_len: int,
) -> Tensor:
    """Causal attention of query [T, heads, head_dim] over the cache -> [T, heads, value_dim].

    The rest as in `vllm.kernels.triton.attention.paged_attention`, with MAX_QUERIES for all numbers
    of heads.
    """
    out = query.new_zeros(*query.shape[:2], value_dim)
    if query.shape[0] == 0:
        return out
    assert query.stride(2) == 1 and cache.is_contiguous()
    call = _Call(
        out, query, cache, block_tables, query_start_loc, seq_lens,
        scale * k_scale * LOG2_E, k_scale,
    )  # fmt: skip
    has_others = seq_lens.shape[0] > 1
    queries = max_query_len if max_query_len <= MAX_QUERIES else 1
    if queries < max_query_len:
        _prefill(call, min_query_len=2 if has_others else 1)
    if queries == max_query_len or has_others:
        _decode(call, queries, max_seq_len)
    return out


def write_latents(latents: Tensor, cache: Tensor, slot_mapping: Tensor, scale: float) -> None:
    """latents [T, head_dim], rows contiguous, into the slots (int64 [T]) of the cache; tokens of
    negative slots are skipped."""
    num_tokens, dim = latents.shape
    if num_tokens == 0:
        return
    assert latents.stride(1) == 1 and cache.is_contiguous()
    write_kernel[(num_tokens,)](
        latents, cache, slot_mapping, scale, latents.stride(0), DIM=dim,
        DIM_PAD=next_power_of_2(dim), LIMIT=torch.finfo(FP8).max if cache.dtype == FP8 else 0.0,
    )  # fmt: skip


class _Call(NamedTuple):
    out: Tensor
    query: Tensor
    cache: Tensor
    block_tables: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    qk_scale: float
    v_scale: float

    def tile(self, num_rows: int) -> Tile:
        latent = self.out.shape[2]
        width = _padded(latent) + _padded(self.cache.shape[2] - latent)
        shared_memory = read_chip(self.query.device).shared_memory
        return tile_of(num_rows, width, self.cache.itemsize, shared_memory)

    def constants(self, tile: Tile) -> tuple[int, dict[str, int]]:
        """How many tiles the heads are, and what both kernels are compiled for."""
        num_heads, latent = self.out.shape[1:]
        num_tiles = cdiv(num_heads, tile.block_m)
        return num_tiles, {
            "NUM_HEADS": num_heads,
            "TILE_HEADS": cdiv(num_heads, num_tiles),
            "LATENT": latent,
            "LATENT_PAD": _padded(latent),
            "ROPE": self.cache.shape[2] - latent,
            "ROPE_PAD": _padded(self.cache.shape[2] - latent),
            "BLOCK_SIZE": self.cache.shape[1],
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }

    def strides(self) -> tuple[int, ...]:
        return *self.query.stride()[:2], *self.out.stride()[:2]

    def is_new(self) -> bool:
        """Whether this is the first call on a GPU of what has to be compiled by itself."""
        types = self.query.dtype, self.cache.dtype, self.query.device
        key = (*types, *self.out.shape[1:], *self.cache.shape[1:])
        if not self.query.is_cuda or key in _compiled:
            return False
        _compiled.add(key)
        return True


_compiled: set[tuple[object, ...]] = set()


def _prefill(call: _Call, min_query_len: int) -> None:
    tile, num_requests = call.tile(64), len(call.seq_lens)
    head_tiles, constants = call.constants(tile)
    tokens = tile.block_m // constants["TILE_HEADS"]
    num_tiles = call.query.shape[0] // tokens + num_requests
    prefill_kernel[(head_tiles, num_tiles)](
        *call, num_requests, num_tiles, call.block_tables.stride(0), min_query_len,
        *call.strides(), **constants,
    )  # fmt: skip


def _decode(call: _Call, queries: int, max_seq_len: int) -> None:
    """queries: new tokens of a request at most. Compiles for one and for several at its first call,
    so that neither is waited for later."""
    _launch_decode(call, queries, max_seq_len)
    if call.is_new():
        _launch_decode(call, 2 if queries == 1 else 1, max_seq_len, is_compiled_only=True)


def _run(kernel: Any, grid: tuple[int, ...], is_compiled_only: bool) -> Callable[..., object]:
    return partial(kernel.warmup, grid=grid) if is_compiled_only else kernel[grid]


def _launch_decode(
    call: _Call, queries: int, max_seq_len: int, is_compiled_only: bool = False
) -> None:
    query, out, num_requests = call.query, call.out, len(call.seq_lens)
    num_heads, latent = out.shape[1:]
    num_rows = queries * num_heads
    # One tile for every number of several tokens, which is compiled once.
    tile = call.tile(num_heads if queries == 1 else 64)
    num_tiles, constants = call.constants(tile)
    if queries > 1:
        num_tiles, constants["TILE_HEADS"] = cdiv(num_rows, tile.block_m), tile.block_m
    num_splits, min_split = splits_of(
        num_requests * num_tiles,
        max_seq_len,
        read_chip(query.device).num_sms,
        max(1, PARTIAL_BYTES // (4 * num_requests * num_rows * latent)),
    )
    min_split = max(min_split, tile.block_n)  # splits are whole tiles
    slots = (num_requests, num_splits, num_rows) if num_splits > 1 else (0,)
    parts = query.new_empty((*slots, latent), dtype=torch.float32)
    parts_lse = query.new_empty(slots, dtype=torch.float32)
    several = {"SEVERAL": queries > 1, **launch_dependent(query.device)}
    grid = num_tiles, num_requests, num_splits
    _run(decode_kernel, grid, is_compiled_only)(
        *call, parts, parts_lse, call.block_tables.stride(0), min_split, num_rows,
        *call.strides(), **constants, **several,
    )  # fmt: skip
    if num_splits > 1:
        grid = num_heads, num_requests, queries
        _run(combine_kernel, grid, is_compiled_only)(
            out, call.query_start_loc, call.seq_lens, parts, parts_lse, min_split, num_splits,
            num_rows, *out.stride()[:2], NUM_HEADS=num_heads, LATENT=latent,
            LATENT_PAD=constants["LATENT_PAD"], BLOCK_N=tile.block_n, AT_ONCE=_AT_ONCE,
            num_warps=4, **several,
        )  # fmt: skip
