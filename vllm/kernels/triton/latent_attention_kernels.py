# mypy: ignore-errors
"""Device code of `latent_attention.py`: names in capitals are compile-time constants.

A latent is a key of LATENT + ROPE columns, and its first LATENT columns are the value: loaded once,
they are multiplied twice. Rows of a tile are heads, which all share the keys, of one or of several
tokens. Arithmetic as in `attention_kernels.py`.
"""

import triton
import triton.language as tl

from vllm.kernels.triton.attention_kernels import (
    _add_tile,
    _begin_softmax,
    _load_blocks,
    _load_tile,
    _normalise,
    _split_keys,
    _widen,
)
from vllm.kernels.triton.moe_kernels import begin_dependent
from vllm.kernels.triton.prefill_kernels import _find_request


@triton.jit
def _load_rows(x, rows, is_row, FIRST: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr):
    """[BLOCK_M, PAD]: columns from FIRST on of rows that begin at `rows`, zeros elsewhere."""
    dims = tl.arange(0, PAD)
    is_loaded = is_row[:, None] & (dims[None, :] < SIZE)
    return tl.load(x + rows[:, None] + FIRST + dims[None, :], mask=is_loaded, other=0.0)


@triton.jit
def _attend(
    query, rotated, cache, table, positions, begin, end, qk_scale,
    LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Keys [begin, end) of which row i sees those up to positions[i]."""
    ROW: tl.constexpr = LATENT + ROPE
    acc, row_max, row_sum = _begin_softmax(BLOCK_M, LATENT_PAD)
    offsets = tl.arange(0, BLOCK_N)
    # Block numbers are fetched a tile ahead: keys wait for them.
    blocks = _load_blocks(table, begin + offsets, end, BLOCK_SIZE)
    for first in range(begin, end, BLOCK_N):
        columns = first + offsets
        k = _load_tile(cache, blocks, first, end, ROW, LATENT, LATENT_PAD, BLOCK_SIZE, BLOCK_N)
        k_rotated = _load_tile(
            cache + LATENT, blocks, first, end, ROW, ROPE, ROPE_PAD, BLOCK_SIZE, BLOCK_N
        )
        blocks = _load_blocks(table, columns + BLOCK_N, end, BLOCK_SIZE)
        k = k.to(query.dtype)
        scores = tl.dot(query, tl.trans(k))
        scores = tl.dot(rotated, tl.trans(k_rotated.to(query.dtype)), scores)
        is_seen = (columns[None, :] <= positions[:, None]) & (columns < end)[None, :]
        scores = tl.where(is_seen, scores, float("-inf"))
        acc, row_max, row_sum = _add_tile(
            acc, row_max, row_sum, scores, k, qk_scale, query.dtype, True
        )
    return acc, row_max, row_sum


@triton.jit(
    do_not_specialize=["table_stride", "min_split", "split_rows"],
    do_not_specialize_on_alignment=["block_tables", "query_start_loc", "seq_lens"],
)
def decode_kernel(
    out, q, cache, block_tables, query_start_loc, seq_lens, qk_scale, v_scale,
    partial, partial_lse, table_stride, min_split, split_rows, q_token, q_head, out_token, out_head,
    NUM_HEADS: tl.constexpr, TILE_HEADS: tl.constexpr, SEVERAL: tl.constexpr,
    LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program takes one of the splits of a request's keys, for TILE_HEADS heads.

    Grid (tiles of heads, requests, splits). A request of one split is written to `out`; of others,
    results go to `partial` [requests, splits, heads, LATENT], with the base-2 logarithm of the sum
    of weights, for `combine_kernel`. SEVERAL: heads are those of all new tokens, one token after
    another, of which `split_rows` have room in a split; a row that sees no key of it has a
    logarithm of -inf. Otherwise requests with more than one new token are left to
    `prefill_kernel`.
    """
    begin_dependent(PDL)
    request, split = tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    token = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - token
    seq_len = tl.load(seq_lens + request)
    first_row = tl.program_id(0) * TILE_HEADS
    if (first_row >= query_len * NUM_HEADS) if SEVERAL else (query_len != 1):
        return
    _, _, length = _split_keys(seq_len, seq_len - 1, num_splits, min_split, 0, BLOCK_N)
    begin = split * length
    if begin >= seq_len:
        return

    rows = tl.arange(0, BLOCK_M)
    own = first_row + rows
    if SEVERAL:
        is_row = (rows < TILE_HEADS) & (own < query_len * NUM_HEADS)
        tokens, heads = own // NUM_HEADS, own % NUM_HEADS
        positions = seq_len - query_len + tokens
        q_places, out_places = tokens * q_token, tokens * out_token
    else:
        is_row = (rows < TILE_HEADS) & (own < NUM_HEADS)
        heads, positions = own, tl.full([BLOCK_M], 1 << 30, tl.int32)
        q_places, out_places = 0, 0
    places = token.to(tl.int64) * q_token + heads * q_head + q_places
    query = _widen(_load_rows(q, places, is_row, 0, LATENT, LATENT_PAD), cache)
    rotated = _widen(_load_rows(q, places, is_row, LATENT, ROPE, ROPE_PAD), cache)
    acc, row_max, row_sum = _attend(
        query, rotated, cache, block_tables + request * table_stride.to(tl.int64),
        positions, begin, tl.minimum(begin + length, seq_len), qk_scale,
        LATENT, LATENT_PAD, ROPE, ROPE_PAD, BLOCK_SIZE, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    result, dims = _normalise(acc, row_sum, v_scale), tl.arange(0, LATENT_PAD)
    is_stored = is_row[:, None] & (dims[None, :] < LATENT)
    if length >= seq_len:
        places = token.to(tl.int64) * out_token + heads * out_head + out_places
        pointers = out + places[:, None] + dims[None, :]
        tl.store(pointers, result.to(out.dtype.element_ty), mask=is_stored)
        return
    rows_apart = split_rows if SEVERAL else NUM_HEADS
    slots = (request.to(tl.int64) * num_splits + split) * rows_apart + own
    tl.store(partial + slots[:, None] * LATENT + dims[None, :], result, mask=is_stored)
    tl.store(partial_lse + slots, row_max + tl.log2(row_sum), mask=is_row)


@triton.jit(
    do_not_specialize=["min_split", "num_splits", "split_rows"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens"],
)
def combine_kernel(
    out, query_start_loc, seq_lens, partial, partial_lse, min_split, num_splits, split_rows,
    out_token, out_head,
    NUM_HEADS: tl.constexpr, SEVERAL: tl.constexpr, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds up the splits of one head of a token. Grid (heads, requests, tokens of a request)."""
    begin_dependent(PDL)
    head, request = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - token
    seq_len = tl.load(seq_lens + request)
    _, _, length = _split_keys(seq_len, seq_len - 1, num_splits, min_split, 0, BLOCK_N)
    index = tl.program_id(2)
    is_served = index < query_len if SEVERAL else query_len == 1
    if (not is_served) | (length >= seq_len):
        return
    row = index * NUM_HEADS + head if SEVERAL else head
    rows_apart = split_rows if SEVERAL else NUM_HEADS
    num_written = tl.cdiv(seq_len, length)
    dims, offsets = tl.arange(0, LATENT_PAD), tl.arange(0, AT_ONCE)
    acc, total = tl.zeros([LATENT_PAD], tl.float32), 0.0
    largest = float("-inf")
    for first in range(0, num_written, AT_ONCE):
        splits = first + offsets
        slots = (request.to(tl.int64) * num_splits + splits) * rows_apart + row
        is_split = splits < num_written
        lse = tl.load(partial_lse + slots, mask=is_split, other=float("-inf"))
        is_loaded = is_split[:, None] & (dims[None, :] < LATENT)
        parts = tl.load(
            partial + slots[:, None] * LATENT + dims[None, :], mask=is_loaded, other=0.0
        )
        shift = tl.maximum(largest, tl.max(lse, 0))
        decay, weights = tl.exp2(largest - shift), tl.exp2(lse - shift)
        acc = acc * decay + tl.sum(parts * weights[:, None], 0)
        total = total * decay + tl.sum(weights, 0)
        largest = shift
    places = out + (token + index).to(tl.int64) * out_token + head * out_head + dims
    tl.store(places, (acc / total).to(out.dtype.element_ty), mask=dims < LATENT)


@triton.jit(
    do_not_specialize=["num_requests", "num_tiles", "table_stride", "min_query_len"],
    do_not_specialize_on_alignment=["block_tables", "query_start_loc", "seq_lens"],
)
def prefill_kernel(
    out, q, cache, block_tables, query_start_loc, seq_lens, qk_scale, v_scale,
    num_requests, num_tiles, table_stride, min_query_len, q_token, q_head, out_token, out_head,
    NUM_HEADS: tl.constexpr, TILE_HEADS: tl.constexpr,
    LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program takes BLOCK_M // TILE_HEADS tokens of a request, for TILE_HEADS heads.

    Grid (tiles of heads, tiles of tokens), the last tiles, which see the most keys, first. Requests
    with fewer than `min_query_len` new tokens are left to `decode_kernel`.
    """
    TILE_TOKENS: tl.constexpr = BLOCK_M // TILE_HEADS
    tile = num_tiles - 1 - tl.program_id(1)
    request, first_tile = _find_request(query_start_loc, num_requests, tile, TILE_TOKENS)
    start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - start
    seq_len = tl.load(seq_lens + request)
    first_token = (tile - first_tile) * TILE_TOKENS
    if (first_token >= query_len) | (query_len < min_query_len):
        return

    rows = tl.arange(0, BLOCK_M)
    tokens = first_token + rows // TILE_HEADS
    heads = tl.program_id(0) * TILE_HEADS + rows % TILE_HEADS
    is_row = (rows < TILE_TOKENS * TILE_HEADS) & (tokens < query_len) & (heads < NUM_HEADS)
    token_rows = (start + tokens).to(tl.int64)
    places = token_rows * q_token + heads * q_head
    query = _widen(_load_rows(q, places, is_row, 0, LATENT, LATENT_PAD), cache)
    rotated = _widen(_load_rows(q, places, is_row, LATENT, ROPE, ROPE_PAD), cache)
    end = tl.minimum(seq_len - query_len + first_token + TILE_TOKENS, seq_len)
    acc, _, row_sum = _attend(
        query, rotated, cache, block_tables + request * table_stride.to(tl.int64),
        seq_len - query_len + tokens, 0, end, qk_scale,
        LATENT, LATENT_PAD, ROPE, ROPE_PAD, BLOCK_SIZE, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    dims = tl.arange(0, LATENT_PAD)
    pointers = out + (token_rows * out_token + heads * out_head)[:, None] + dims[None, :]
    is_stored = is_row[:, None] & (dims[None, :] < LATENT)
    result = _normalise(acc, row_sum, v_scale)
    tl.store(pointers, result.to(out.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def write_kernel(
    latents, cache, slot_mapping, scale, token_stride,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """A program writes the latent of one token; LIMIT 0 casts, another scales and clamps to it."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    dims = tl.arange(0, DIM_PAD)
    x = tl.load(latents + token * token_stride + dims, mask=dims < DIM)
    if LIMIT > 0:
        x = tl.div_rn(x.to(tl.float32), scale)
        x = tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    tl.store(cache + slot * DIM + dims, x.to(cache.dtype.element_ty), mask=dims < DIM)
