# mypy: ignore-errors
"""Device code of `attention.py` for prompts, in tiles of queries. Conventions of
`attention_kernels.py`."""

import triton
import triton.language as tl

from vllm.kernels.triton.attention_kernels import (
    _add_sinks,
    _add_tile,
    _begin_softmax,
    _cap,
    _first_seen,
    _load_blocks,
    _load_tile,
    _normalise,
    _widen,
    _zero_padding,
)


@triton.jit
def _find_request(query_start_loc, num_requests, tile, TILE_TOKENS: tl.constexpr):
    """The last request whose tiles begin at or before `tile`, and its first tile.

    Request r has its tiles from query_start_loc[r] // TILE_TOKENS + r on: as many as it needs, and
    at times one too many.
    """
    low, high = 0, num_requests
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(query_start_loc + middle) // TILE_TOKENS + middle
        low = tl.where(first <= tile, middle, low)
        high = tl.where(first <= tile, high, middle)
    return low, tl.load(query_start_loc + low) // TILE_TOKENS + low


@triton.jit
def _seen_tiles(
    first_position, last_position, window, CHUNKED: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Tiles of keys [begin, end) that queries see; all see all of [full_begin, full_end)."""
    oldest = _first_seen(first_position, window, CHUNKED)
    newest = _first_seen(last_position, window, CHUNKED)
    begin, end = oldest // BLOCK_N, tl.cdiv(last_position + 1, BLOCK_N)
    full_begin = tl.minimum(tl.cdiv(newest, BLOCK_N), end)
    full_end = tl.maximum((first_position + 1) // BLOCK_N, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def _attend_full_tiles(
    acc, row_max, row_sum, query, keys, values, table, begin, end, qk_scale, softcap,
    ROW: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Tiles of which every query sees every key: nothing is masked."""
    offsets = tl.arange(0, BLOCK_N)
    # Block numbers are fetched a tile ahead: keys wait for them.
    blocks = tl.load(table + (begin * BLOCK_N + offsets) // BLOCK_SIZE, begin < end, 0)
    for index in range(begin, end):
        first = index * BLOCK_N
        k = _load_tile(keys, blocks, first, None, ROW, DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N)
        v = _load_tile(values, blocks, first, None, ROW, DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N)
        after = first + BLOCK_N + offsets
        blocks = tl.load(table + after // BLOCK_SIZE, index + 1 < end, 0)
        scores = tl.dot(query, tl.trans(k.to(query.dtype)))
        scores, factor = _cap(scores, qk_scale, softcap)
        acc, row_max, row_sum = _add_tile(
            acc, row_max, row_sum, scores, v, factor, query.dtype, False
        )
    return acc, row_max, row_sum


@triton.jit
def _attend_cut_tiles(
    acc, row_max, row_sum, query, keys, values, table, positions, tiles, seq_len, window,
    qk_scale, softcap, CHUNKED: tl.constexpr, ROW: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The tiles before and after the full ones: of the window's old edge, and of the diagonal."""
    begin, full_begin, full_end, end = tiles
    offsets = tl.arange(0, BLOCK_N)
    num_full = full_end - full_begin
    for cut in range(begin, end - num_full):
        first = tl.where(cut < full_begin, cut, cut + num_full) * BLOCK_N
        blocks = _load_blocks(table, first + offsets, seq_len, BLOCK_SIZE)
        k = _load_tile(keys, blocks, first, None, ROW, DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N)
        v = _load_tile(values, blocks, first, seq_len, ROW, DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N)
        scores = tl.dot(query, tl.trans(k.to(query.dtype)))
        scores, factor = _cap(scores, qk_scale, softcap)
        newest = (positions - first)[:, None]
        if CHUNKED:
            oldest = (_first_seen(positions, window, CHUNKED) - first)[:, None]
            is_seen = (offsets[None, :] <= newest) & (offsets[None, :] >= oldest)
        else:
            is_seen = (offsets[None, :] <= newest) & (offsets[None, :] > newest - window)
        scores = tl.where(is_seen, scores, float("-inf"))
        acc, row_max, row_sum = _add_tile(
            acc, row_max, row_sum, scores, v, factor, query.dtype, True
        )
    return acc, row_max, row_sum


@triton.jit(
    do_not_specialize=[
        "num_tokens", "num_requests", "num_tiles", "table_stride", "sliding_window",
        "min_query_len",
    ],
    do_not_specialize_on_alignment=["block_tables", "query_start_loc", "seq_lens"],
)  # fmt: skip
def prefill_kernel(
    out, q, k_cache, v_cache, block_tables, query_start_loc, seq_lens,
    qk_scale, softcap, v_scale, sliding_window, sinks, CHUNKED: tl.constexpr, num_tokens,
    num_requests, num_tiles, table_stride, min_query_len, q_token, q_head, out_token, out_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program takes BLOCK_M // GROUP tokens of a request, for the heads of one K and V head.

    Grid (kv heads * tiles), the last tiles, which see the most keys, first. Requests with fewer
    than `min_query_len` new tokens are left to `decode_kernel`.
    """
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0) % KV_HEADS
    tile = num_tiles - 1 - tl.program_id(0) // KV_HEADS
    first_head = kv_head * GROUP
    num_rows = tl.load(query_start_loc + num_requests)
    _zero_padding(out, num_rows, num_tokens, out_token, out_head, first_head, tile, num_tiles,
                  GROUP, DIM, DIM_PAD)  # fmt: skip
    request, first_tile = _find_request(query_start_loc, num_requests, tile, TILE_TOKENS)
    start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - start
    seq_len = tl.load(seq_lens + request)
    first_token = (tile - first_tile) * TILE_TOKENS
    if (first_token >= query_len) | (query_len < min_query_len):
        return

    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, DIM_PAD)
    tokens = first_token + rows // GROUP
    is_row = (rows < TILE_TOKENS * GROUP) & (tokens < query_len)
    is_stored = is_row[:, None] & (dims[None, :] < DIM)
    token_rows, heads = (start + tokens).to(tl.int64), first_head + rows % GROUP
    pointers = q + (token_rows * q_token + heads * q_head)[:, None] + dims[None, :]
    query = _widen(tl.load(pointers, mask=is_stored, other=0.0), k_cache)

    first_position = seq_len - query_len + first_token
    last_position = tl.minimum(first_position + TILE_TOKENS, seq_len) - 1
    window = tl.where(sliding_window > 0, sliding_window, 1 << 30)
    tiles = _seen_tiles(first_position, last_position, window, CHUNKED, BLOCK_N)
    table = block_tables + request * table_stride.to(tl.int64)
    keys, values = k_cache + kv_head * DIM, v_cache + kv_head * DIM
    acc, row_max, row_sum = _begin_softmax(BLOCK_M, DIM_PAD)
    acc, row_max, row_sum = _attend_full_tiles(
        acc, row_max, row_sum, query, keys, values, table, tiles[1], tiles[2], qk_scale, softcap,
        KV_HEADS * DIM, DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    acc, row_max, row_sum = _attend_cut_tiles(
        acc, row_max, row_sum, query, keys, values, table, seq_len - query_len + tokens, tiles,
        seq_len, window, qk_scale, softcap, CHUNKED, KV_HEADS * DIM, DIM, DIM_PAD, BLOCK_SIZE,
        BLOCK_N,
    )  # fmt: skip
    pointers = out + (token_rows * out_token + heads * out_head)[:, None] + dims[None, :]
    row_sum = _add_sinks(row_max, row_sum, sinks, heads, is_row)
    result = _normalise(acc, row_sum, v_scale)
    tl.store(pointers, result.to(out.dtype.element_ty), mask=is_stored)
