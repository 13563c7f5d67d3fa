# mypy: ignore-errors
"""Device code of `attention.py`: names in capitals are compile-time constants.

The query heads that share a K and V head are rows of one tile, so that a key is read once for all
of them. Scores, softmax and sums are float32; exponentials are powers of two, with log2(e) in the
scale of the scores. Numbers that vary from step to step are not specialised: each kernel is
compiled once for a model.
"""

import triton
import triton.language as tl

# ---------------------------------------------------------------- parts of both kernels


@triton.jit
def _load_blocks(table, positions, num_keys, BLOCK_SIZE: tl.constexpr):
    """Numbers of the blocks of `positions`; those past the keys name block 0, a safe address."""
    return tl.load(table + positions // BLOCK_SIZE, mask=positions < num_keys, other=0)


@triton.jit
def _load_rows(
    cache, blocks, positions, num_keys,
    ROW: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """[positions, DIM_PAD] of one head; zeros past `num_keys` unless that is None."""
    rows = blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    dims = tl.arange(0, DIM_PAD)
    pointers = cache + rows[:, None] * ROW + dims[None, :]
    if num_keys is not None:
        is_loaded = (positions < num_keys)[:, None] & (dims[None, :] < DIM)
        return tl.load(pointers, mask=is_loaded, other=0.0)
    if DIM != DIM_PAD:
        return tl.load(pointers, mask=dims[None, :] < DIM, other=0.0)
    return tl.load(pointers)


@triton.jit
def _widen(query, cache):
    """The query in the type of the products: float16 over an FP8 cache.

    E4M3 becomes float16 in one instruction and bfloat16 in three. A query past 65504 is clamped.
    """
    if cache.dtype.element_ty == tl.float8e4nv:
        query = tl.clamp(query.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    return query


@triton.jit
def _begin_softmax(BLOCK_M: tl.constexpr, DIM_PAD: tl.constexpr):
    """Weighted sums of values, and for each row the largest score and the sum of weights."""
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return tl.zeros([BLOCK_M, DIM_PAD], tl.float32), row_max, tl.zeros([BLOCK_M], tl.float32)


@triton.jit
def _add_tile(acc, row_max, row_sum, scores, v, qk_scale, dtype: tl.constexpr):
    """One step of the online softmax; weights and values are multiplied in `dtype`."""
    new_max = tl.maximum(row_max, tl.max(scores, 1) * qk_scale)
    # A row that has seen no key yet: -inf - -inf would be NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * qk_scale - shift[:, None])
    decay = tl.exp2(row_max - shift)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(dtype), v.to(dtype), acc * decay[:, None])
    return acc, new_max, row_sum


@triton.jit
def _zero_padding(
    out, query_start_loc, num_requests, num_tokens, out_token, out_head, first_head, pid, stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Zeros in the rows after the last request's, every `stride`th from `pid` on."""
    dims = tl.arange(0, DIM_PAD)
    for row in range(tl.load(query_start_loc + num_requests) + pid, num_tokens, stride):
        for head in range(GROUP):
            start = out + row * out_token.to(tl.int64) + (first_head + head) * out_head
            tl.store(start + dims, tl.zeros([DIM_PAD], out.dtype.element_ty), mask=dims < DIM)


# ---------------------------------------------------------------- one new token for each request


@triton.jit
def _split_keys(seq_len, num_splits, min_split, sliding_window, BLOCK_N: tl.constexpr):
    """The first key that is seen, and how many keys a split has."""
    begin = tl.where(sliding_window > 0, tl.maximum(seq_len - sliding_window, 0), 0)
    even = tl.cdiv(tl.cdiv(seq_len - begin, num_splits), BLOCK_N) * BLOCK_N
    return begin, tl.maximum(even, min_split)


@triton.jit(
    do_not_specialize=["num_tokens", "table_stride", "sliding_window", "min_split"],
    do_not_specialize_on_alignment=["block_tables", "query_start_loc", "seq_lens"],
)
def decode_kernel(
    out, q, k_cache, v_cache, block_tables, query_start_loc, seq_lens,
    qk_scale, v_scale, sliding_window, partial, partial_lse, num_tokens, table_stride, min_split,
    q_token, q_head, out_token, out_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program takes one of the splits of a request's keys, for the heads of one K and V head.

    Grid (kv heads, requests, splits): splits that a request does not have, which end at once, come
    last and keep no others waiting. A request of one split is written to `out`, others to
    `partial` [requests, heads, splits, dim], with the base-2 logarithm of the sum of weights.
    Requests with more than one new token are left to `prefill_kernel`.
    """
    kv_head, request, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_requests, num_splits = tl.num_programs(1), tl.num_programs(2)
    first_head = kv_head * GROUP
    if split == 0:
        _zero_padding(out, query_start_loc, num_requests, num_tokens, out_token, out_head,
                      first_head, request, num_requests, GROUP, DIM, DIM_PAD)  # fmt: skip
    token = tl.load(query_start_loc + request)
    if tl.load(query_start_loc + request + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens + request)
    begin, length = _split_keys(seq_len, num_splits, min_split, sliding_window, BLOCK_N)
    is_only = length >= seq_len - begin
    begin += split * length
    end = tl.minimum(begin + length, seq_len)
    if (split > 0) & (begin >= end):
        return

    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, DIM_PAD)
    is_stored = (rows[:, None] < GROUP) & (dims[None, :] < DIM)
    heads = first_head + rows
    pointers = q + token.to(tl.int64) * q_token + heads[:, None] * q_head + dims[None, :]
    query = _widen(tl.load(pointers, mask=is_stored, other=0.0), k_cache)
    table = block_tables + request * table_stride.to(tl.int64)
    keys, values = k_cache + kv_head * DIM, v_cache + kv_head * DIM
    acc, row_max, row_sum = _begin_softmax(BLOCK_M, DIM_PAD)
    offsets = tl.arange(0, BLOCK_N)
    # Block numbers are fetched a tile ahead: keys wait for them.
    blocks = _load_blocks(table, begin + offsets, end, BLOCK_SIZE)
    for tile in range(begin, end, BLOCK_N):
        columns = tile + offsets
        k = _load_rows(keys, blocks, columns, None, KV_HEADS * DIM, DIM, DIM_PAD, BLOCK_SIZE)
        v = _load_rows(values, blocks, columns, end, KV_HEADS * DIM, DIM, DIM_PAD, BLOCK_SIZE)
        blocks = _load_blocks(table, columns + BLOCK_N, end, BLOCK_SIZE)
        scores = tl.dot(query, tl.trans(k.to(query.dtype)))
        scores = tl.where((columns < end)[None, :], scores, float("-inf"))
        acc, row_max, row_sum = _add_tile(acc, row_max, row_sum, scores, v, qk_scale, query.dtype)

    result = acc * (v_scale / tl.where(row_sum == 0, 1.0, row_sum))[:, None]
    if is_only:
        pointers = out + token.to(tl.int64) * out_token + heads[:, None] * out_head + dims[None, :]
        tl.store(pointers, result.to(out.dtype.element_ty), mask=is_stored)
    else:
        slots = (request.to(tl.int64) * KV_HEADS * GROUP + heads) * num_splits + split
        tl.store(partial + slots[:, None] * DIM + dims[None, :], result, mask=is_stored)
        tl.store(partial_lse + slots, row_max + tl.log2(row_sum), mask=rows < GROUP)


@triton.jit(
    do_not_specialize=["num_splits", "sliding_window", "min_split"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens"],
)
def combine_kernel(
    out, partial, partial_lse, query_start_loc, seq_lens, num_splits, sliding_window, min_split,
    out_token, out_head,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_N: tl.constexpr, MAX_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Sums the splits that `decode_kernel` wrote. Grid (heads, requests)."""
    head, request = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start_loc + request)
    if tl.load(query_start_loc + request + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens + request)
    begin, length = _split_keys(seq_len, num_splits, min_split, sliding_window, BLOCK_N)
    num_written = tl.cdiv(seq_len - begin, length)
    if num_written <= 1:
        return

    first = (request.to(tl.int64) * tl.num_programs(0) + head) * num_splits
    dims, splits = tl.arange(0, DIM_PAD), tl.arange(0, MAX_SPLITS)
    lse = tl.load(partial_lse + first + splits, mask=splits < num_written, other=float("-inf"))
    shift = tl.max(lse, 0)
    total = tl.sum(tl.exp2(lse - shift), 0)
    acc = tl.zeros([DIM_PAD], tl.float32)
    for chunk in range(0, num_written, CHUNK):
        some = chunk + tl.arange(0, CHUNK)
        some_lse = tl.load(partial_lse + first + some, some < num_written, float("-inf"))
        is_valid = (some[:, None] < num_written) & (dims[None, :] < DIM)
        pointers = partial + (first + some)[:, None] * DIM + dims[None, :]
        part = tl.load(pointers, mask=is_valid, other=0.0)
        acc += tl.sum(part * tl.exp2(some_lse - shift)[:, None], 0)
    start = out + token.to(tl.int64) * out_token + head * out_head
    tl.store(start + dims, (acc / total).to(out.dtype.element_ty), mask=dims < DIM)


# ---------------------------------------------------------------- prompts


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
def _seen_tiles(first_position, last_position, sliding_window, BLOCK_N: tl.constexpr):
    """Tiles of keys [begin, end) that queries see; all see all of [full_begin, full_end)."""
    oldest = tl.where(sliding_window > 0, first_position - sliding_window + 1, 0)
    newest = tl.where(sliding_window > 0, last_position - sliding_window + 1, 0)
    begin, end = tl.maximum(oldest, 0) // BLOCK_N, tl.cdiv(last_position + 1, BLOCK_N)
    full_begin, full_end = tl.cdiv(tl.maximum(newest, 0), BLOCK_N), (first_position + 1) // BLOCK_N
    return begin, full_begin, full_end, end


@triton.jit(
    do_not_specialize=[
        "num_tokens", "num_requests", "num_tiles", "table_stride", "sliding_window",
        "min_query_len",
    ],
    do_not_specialize_on_alignment=["block_tables", "query_start_loc", "seq_lens"],
)  # fmt: skip
def prefill_kernel(
    out, q, k_cache, v_cache, block_tables, query_start_loc, seq_lens,
    qk_scale, v_scale, sliding_window, num_tokens, num_requests, num_tiles, table_stride,
    min_query_len, q_token, q_head, out_token, out_head,
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
    _zero_padding(out, query_start_loc, num_requests, num_tokens, out_token, out_head,
                  first_head, tile, num_tiles, GROUP, DIM, DIM_PAD)  # fmt: skip
    request, first_tile = _find_request(query_start_loc, num_requests, tile, TILE_TOKENS)
    start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - start
    first_token = (tile - first_tile) * TILE_TOKENS
    if (first_token >= query_len) | (query_len < min_query_len):
        return

    seq_len = tl.load(seq_lens + request)
    rows, dims, offsets = tl.arange(0, BLOCK_M), tl.arange(0, DIM_PAD), tl.arange(0, BLOCK_N)
    tokens = first_token + rows // GROUP
    is_row = (rows < TILE_TOKENS * GROUP) & (tokens < query_len)
    is_stored = is_row[:, None] & (dims[None, :] < DIM)
    token_rows, heads = (start + tokens).to(tl.int64), first_head + rows % GROUP
    pointers = q + (token_rows * q_token + heads * q_head)[:, None] + dims[None, :]
    query = _widen(tl.load(pointers, mask=is_stored, other=0.0), k_cache)

    positions = seq_len - query_len + tokens
    first_position = seq_len - query_len + first_token
    last_position = tl.minimum(first_position + TILE_TOKENS, seq_len) - 1
    begin, full_begin, full_end, end = _seen_tiles(
        first_position, last_position, sliding_window, BLOCK_N
    )
    table = block_tables + request * table_stride.to(tl.int64)
    keys, values = k_cache + kv_head * DIM, v_cache + kv_head * DIM
    acc, row_max, row_sum = _begin_softmax(BLOCK_M, DIM_PAD)
    blocks = _load_blocks(table, begin * BLOCK_N + offsets, seq_len, BLOCK_SIZE)
    for index in range(begin, end):
        columns = index * BLOCK_N + offsets
        k = _load_rows(keys, blocks, columns, None, KV_HEADS * DIM, DIM, DIM_PAD, BLOCK_SIZE)
        v = _load_rows(values, blocks, columns, seq_len, KV_HEADS * DIM, DIM, DIM_PAD, BLOCK_SIZE)
        blocks = _load_blocks(table, columns + BLOCK_N, seq_len, BLOCK_SIZE)
        scores = tl.dot(query, tl.trans(k.to(query.dtype)))
        if (index < full_begin) | (index >= full_end):
            distance = positions[:, None] - columns[None, :]
            is_seen = (distance >= 0) & ((distance < sliding_window) | (sliding_window <= 0))
            scores = tl.where(is_seen, scores, float("-inf"))
        acc, row_max, row_sum = _add_tile(acc, row_max, row_sum, scores, v, qk_scale, query.dtype)

    result = acc * (v_scale / tl.where(row_sum == 0, 1.0, row_sum))[:, None]
    pointers = out + (token_rows * out_token + heads * out_head)[:, None] + dims[None, :]
    tl.store(pointers, result.to(out.dtype.element_ty), mask=is_stored)


# ---------------------------------------------------------------- writing the cache


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def write_kernel(
    key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale,
    key_token, key_head, value_token, value_head,
    DIM: tl.constexpr, ROW: tl.constexpr, ROW_PAD: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """A program writes K and V of one token; LIMIT 0 casts, another scales and clamps to it."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    columns = tl.arange(0, ROW_PAD)
    heads, dims, is_valid = columns // DIM, columns % DIM, columns < ROW
    k = tl.load(key + token * key_token + heads * key_head + dims, mask=is_valid)
    v = tl.load(value + token * value_token + heads * value_head + dims, mask=is_valid)
    if LIMIT > 0:
        k = tl.div_rn(k.to(tl.float32), k_scale)
        v = tl.div_rn(v.to(tl.float32), v_scale)
        k = tl.clamp(k, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        v = tl.clamp(v, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    tl.store(k_cache + slot * ROW + columns, k.to(k_cache.dtype.element_ty), mask=is_valid)
    tl.store(v_cache + slot * ROW + columns, v.to(v_cache.dtype.element_ty), mask=is_valid)
