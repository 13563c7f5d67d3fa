# mypy: ignore-errors
"""Device code of `attention.py`: names in capitals are compile-time constants.

The query heads that share a K and V head are rows of one tile, so that a key is read once for all
of them. Scores, softmax and sums are float32; exponentials are powers of two, with log2(e) in the
scale of the scores. Numbers that vary from step to step are not specialised: each kernel is
compiled once for a model and a tile.
"""

import triton
import triton.language as tl

from vllm.kernels.triton.moe_kernels import begin_dependent

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)

# ---------------------------------------------------------------- parts of both kernels


@triton.jit
def _load_blocks(table, positions, num_keys, BLOCK_SIZE: tl.constexpr):
    """Numbers of the blocks of `positions`; those past the keys name block 0, a safe address."""
    return tl.load(table + positions // BLOCK_SIZE, mask=positions < num_keys, other=0)


@triton.jit
def _load_tile(
    cache, blocks, first, num_keys,
    ROW: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, DIM_PAD] of one head: keys from `first`, a multiple of BLOCK_N, on.

    Zeros past `num_keys` unless that is None.
    """
    offsets, dims = tl.arange(0, BLOCK_N), tl.arange(0, DIM_PAD)
    # Where blocks divide the tile, the places in them are the same for every tile.
    places = offsets % BLOCK_SIZE if BLOCK_N % BLOCK_SIZE == 0 else (first + offsets) % BLOCK_SIZE
    starts = cache + blocks.to(tl.int64) * (BLOCK_SIZE * ROW)
    pointers = starts[:, None] + ((places * ROW)[:, None] + dims[None, :])
    if num_keys is not None:
        is_loaded = (first + offsets < num_keys)[:, None] & (dims[None, :] < DIM)
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
def _cap(scores, qk_scale, softcap):
    """Scores, and what they are still to be multiplied with. With a cap they are bounded before
    keys are masked: softcap * tanh(x), with tanh(x) = 1 - 2 / (1 + 2^(score * qk_scale))."""
    factor = qk_scale
    if softcap is not None:
        scores = softcap - 2 * softcap / (1 + tl.exp2(scores * qk_scale))
        factor = 1.0
    return scores, factor


@triton.jit
def _add_tile(
    acc, row_max, row_sum, scores, v, qk_scale, DTYPE: tl.constexpr, MASKED: tl.constexpr
):
    """One step of the online softmax; weights and values are multiplied in DTYPE."""
    new_max = tl.maximum(row_max, tl.max(scores, 1) * qk_scale)
    # A row that has seen no key yet: -inf - -inf would be NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    weights = tl.exp2(scores * qk_scale - shift[:, None])
    decay = tl.exp2(row_max - shift)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(DTYPE), v.to(DTYPE), acc * decay[:, None])
    return acc, new_max, row_sum


@triton.jit
def _add_sinks(row_max, row_sum, sinks, heads, is_row):
    """Sums of weights with those of the heads' sinks, logits of keys without values."""
    if sinks is not None:
        logits = tl.load(sinks + heads, mask=is_row, other=float("-inf")) * LOG2_E
        shift = tl.where(row_max == float("-inf"), 0.0, row_max)
        row_sum += tl.exp2(logits - shift)
    return row_sum


@triton.jit
def _normalise(acc, row_sum, v_scale):
    """Zeros in rows that have seen no key."""
    return acc * (v_scale / tl.where(row_sum == 0, 1.0, row_sum))[:, None]


@triton.jit
def _zero_padding(
    out, first_row, num_tokens, out_token, out_head, first_head, pid, stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Zeros in the rows from `first_row` on, every `stride`th from the `pid`th."""
    dims = tl.arange(0, DIM_PAD)
    for row in range(first_row + pid, num_tokens, stride):
        for head in range(GROUP):
            start = out + row * out_token.to(tl.int64) + (first_head + head) * out_head
            tl.store(start + dims, tl.zeros([DIM_PAD], out.dtype.element_ty), mask=dims < DIM)


# ---------------------------------------------------------------- few new tokens for each request


@triton.jit
def _first_seen(position, window, CHUNKED: tl.constexpr):
    """The first key that a query at `position` sees; 0 before all keys, where padding is."""
    first = position // window * window if CHUNKED else position - window + 1
    return tl.maximum(first, 0)


@triton.jit
def _split_keys(
    seq_len, position, num_splits, min_split, sliding_window, BLOCK_N: tl.constexpr,
    CHUNKED: tl.constexpr = False,
):  # fmt: skip
    """The oldest key that is seen, the first of its tile, and how many keys a split has.

    position: of the first new token.
    """
    oldest = tl.where(sliding_window > 0, _first_seen(position, sliding_window, CHUNKED), 0)
    begin = oldest // BLOCK_N * BLOCK_N
    even = tl.cdiv(tl.cdiv(seq_len - begin, num_splits), BLOCK_N) * BLOCK_N
    return oldest, begin, tl.maximum(even, min_split)


@triton.jit
def _combine_splits(
    partial, partial_lse, num_written, sinks, SPLIT_ROWS: tl.constexpr,
    ROW: tl.constexpr, ROW_PAD: tl.constexpr, DIM: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Weighted sums [ROW_PAD] of splits, for the heads of one token: of `partial` [splits, ROW] and
    `partial_lse` [splits, heads], in which splits are SPLIT_ROWS heads apart.

    .cg: what other SMs have written is in L2, not in the L1 of this one.
    """
    columns = tl.arange(0, ROW_PAD)
    is_column = columns < ROW
    acc, total = tl.zeros([ROW_PAD], tl.float32), tl.zeros([ROW_PAD], tl.float32)
    largest = tl.full([ROW_PAD], float("-inf"), tl.float32)
    for first in range(0, num_written, AT_ONCE):
        parts, scores = (), ()
        for i in tl.static_range(AT_ONCE):  # all are on their way before the first is used
            split = first + i
            is_loaded = is_column & (split < num_written)
            lse = partial_lse + split * SPLIT_ROWS + columns // DIM
            scores += (tl.load(lse, is_loaded, float("-inf"), cache_modifier=".cg"),)
            part = partial + split * (SPLIT_ROWS * DIM) + columns
            parts += (tl.load(part, is_loaded, 0.0, cache_modifier=".cg"),)
        largest_before = largest
        for i in tl.static_range(AT_ONCE):
            largest = tl.maximum(largest, scores[i])
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        decay = tl.exp2(largest_before - shift)
        acc, total = acc * decay, total * decay
        for i in tl.static_range(AT_ONCE):
            weights = tl.exp2(scores[i] - shift)
            acc += parts[i] * weights
            total += weights
    total = _add_sinks(largest, total, sinks, columns // DIM, is_column)
    return acc / tl.where(total == 0, 1.0, total)


@triton.jit
def _combine_token(
    partial, partial_lse, num_written, start, out_head, sinks,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, ROW_PAD: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Adds up the splits of the heads of one token, whose result begins at `start`."""
    columns = tl.arange(0, ROW_PAD)
    total = _combine_splits(
        partial, partial_lse, num_written, sinks, QUERIES * GROUP, GROUP * DIM, ROW_PAD, DIM,
        AT_ONCE,
    )  # fmt: skip
    places = start + columns // DIM * out_head + columns % DIM
    tl.store(places, total.to(start.dtype.element_ty), mask=columns < GROUP * DIM)


@triton.jit
def _store_split(
    result, lse, is_row, split, num_written, partial, partial_lse, num_arrived, query_len, start,
    out_token, out_head, sinks, GROUP: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, BLOCK_M: tl.constexpr, ROW_PAD: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Keeps the result of one split; the last to arrive adds up all, and clears the counter.

    sinks: of the program's heads."""
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, DIM_PAD)
    places = split * (QUERIES * GROUP) + rows
    is_stored = is_row[:, None] & (dims[None, :] < DIM)
    tl.store(partial + places[:, None] * DIM + dims[None, :], result, mask=is_stored)
    tl.store(partial_lse + places, lse, mask=is_row)
    tl.debug_barrier()  # one thread counts for all: after all have stored
    if tl.atomic_add(num_arrived, 1, sem="acq_rel") == num_written - 1:
        tl.store(num_arrived, 0)
        for token in range(1 if QUERIES == 1 else query_len):
            _combine_token(
                partial + token * (GROUP * DIM), partial_lse + token * GROUP, num_written,
                start + token * out_token, out_head, sinks, GROUP, QUERIES, DIM, ROW_PAD, AT_ONCE,
            )  # fmt: skip


@triton.jit
def _store_rows(
    acc, row_max, row_sum, v_scale, tokens, heads, is_row, split, num_splits, num_keys, length,
    partial, partial_lse, num_arrived, slot, query_len, start, out_token, out_head, sinks,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, ROW_PAD: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """To `start`, the place of the request's first token, where `num_keys` are one split. Else to
    `partial` [requests, kv heads, splits, QUERIES * GROUP, dim], with the base-2 logarithm of the
    sum of weights, -inf for a row that sees no key of the split; the program that arrives last adds
    them up, and leaves `num_arrived` [requests, kv heads] zero, as it found it. slot: the number of
    the request and K and V head."""
    if length >= num_keys:
        dims = tl.arange(0, DIM_PAD)
        row_sum = _add_sinks(row_max, row_sum, sinks, heads, is_row)
        result = _normalise(acc, row_sum, v_scale).to(start.dtype.element_ty)
        places = start + (tokens * out_token + heads * out_head)[:, None] + dims[None, :]
        tl.store(places, result, mask=is_row[:, None] & (dims[None, :] < DIM))
    else:
        own = slot * num_splits * (QUERIES * GROUP)
        _store_split(
            _normalise(acc, row_sum, v_scale), row_max + tl.log2(row_sum), is_row, split,
            tl.cdiv(num_keys, length), partial + own * DIM, partial_lse + own, num_arrived + slot,
            query_len, start, out_token, out_head, sinks, GROUP, QUERIES, DIM, DIM_PAD, BLOCK_M,
            ROW_PAD, AT_ONCE,
        )  # fmt: skip


@triton.jit
def _attend_split(
    query, keys, values, table, begin, end, oldest, past, qk_scale, softcap,
    ROW: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Keys [begin, end), of which rows see [oldest, past): numbers, or one for each row [BLOCK_M,
    1]. Then, too, all tiles are masked alike: it is one more comparison, and memory is waited for.
    """
    acc, row_max, row_sum = _begin_softmax(BLOCK_M, DIM_PAD)
    offsets = tl.arange(0, BLOCK_N)
    # Block numbers are fetched a tile ahead: keys wait for them.
    blocks = _load_blocks(table, begin + offsets, end, BLOCK_SIZE)
    for first in range(begin, end, BLOCK_N):
        columns = first + offsets
        k = _load_tile(keys, blocks, first, None, ROW, DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N)
        v = _load_tile(values, blocks, first, end, ROW, DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N)
        blocks = _load_blocks(table, columns + BLOCK_N, end, BLOCK_SIZE)
        scores = tl.dot(query, tl.trans(k.to(query.dtype)))
        scores, factor = _cap(scores, qk_scale, softcap)
        is_seen = (columns[None, :] >= oldest) & (columns[None, :] < past)
        scores = tl.where(is_seen, scores, float("-inf"))
        acc, row_max, row_sum = _add_tile(
            acc, row_max, row_sum, scores, v, factor, query.dtype, True
        )
    return acc, row_max, row_sum


@triton.jit
def _place_rows(query_len, GROUP: tl.constexpr, QUERIES: tl.constexpr, BLOCK_M: tl.constexpr):
    """The token and the head of each row, and whether there is one."""
    rows = tl.arange(0, BLOCK_M)
    if QUERIES == 1:
        return 0, rows, rows < GROUP
    else:
        is_row = (rows < QUERIES * GROUP) & (rows // GROUP < query_len)
        return rows // GROUP, rows % GROUP, is_row


@triton.jit
def _seen_by_rows(
    first_position, tokens, oldest, end, window, CHUNKED: tl.constexpr, QUERIES: tl.constexpr
):
    """[oldest, past) of the keys before `end` for each row, or numbers where there is one token."""
    past = end
    if QUERIES > 1:
        positions = (first_position + tokens)[:, None]
        oldest = tl.where(window > 0, _first_seen(positions, window, CHUNKED), 0)
        past = tl.minimum(positions + 1, end)
    return oldest, past


@triton.jit(
    do_not_specialize=["num_tokens", "table_stride", "sliding_window", "min_split"],
    do_not_specialize_on_alignment=["block_tables", "query_start_loc", "seq_lens"],
)
def decode_kernel(
    out, q, k_cache, v_cache, block_tables, query_start_loc, seq_lens,
    qk_scale, softcap, v_scale, sliding_window, sinks, CHUNKED: tl.constexpr, partial, partial_lse,
    num_arrived, num_tokens, table_stride, min_split, q_token, q_head, out_token, out_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUERIES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROW_PAD: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program takes one of the splits of a request's keys, for the heads of one K and V head.

    Requests have up to QUERIES tokens, whose heads are rows of one tile (token * GROUP + head);
    with QUERIES 1, those of more are left to `prefill_kernel`. Grid (kv heads, requests, splits):
    splits that a request does not have, which end at once, come last and keep no others waiting.
    """
    begin_dependent(PDL)  # so that the output projection fetches its weight meanwhile
    kv_head, request, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_requests, num_splits = tl.num_programs(1), tl.num_programs(2)
    first_head = kv_head * GROUP
    # Loads that do not wait for one another come first: a program begins with their latency.
    num_rows = tl.load(query_start_loc + num_requests)
    token = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - token
    seq_len = tl.load(seq_lens + request)
    if split == 0:
        _zero_padding(out, num_rows, num_tokens, out_token, out_head, first_head, request,
                      num_requests, GROUP, DIM, DIM_PAD)  # fmt: skip
    if (query_len != 1) if QUERIES == 1 else (query_len == 0):
        return
    first_position = seq_len - query_len
    oldest, first_key, length = _split_keys(
        seq_len, first_position, num_splits, min_split, sliding_window, BLOCK_N, CHUNKED,
    )  # fmt: skip
    begin = first_key + split * length
    if (split > 0) & (begin >= seq_len):
        return
    end = tl.minimum(begin + length, seq_len)
    tokens, heads, is_row = _place_rows(query_len, GROUP, QUERIES, BLOCK_M)
    oldest, past = _seen_by_rows(
        first_position, tokens, oldest, end, sliding_window, CHUNKED, QUERIES)  # fmt: skip
    dims = tl.arange(0, DIM_PAD)
    is_stored = is_row[:, None] & (dims[None, :] < DIM)
    places = tokens * q_token + (first_head + heads) * q_head
    pointers = q + token.to(tl.int64) * q_token + places[:, None] + dims[None, :]
    query = _widen(tl.load(pointers, mask=is_stored, other=0.0), k_cache)
    acc, row_max, row_sum = _attend_split(
        query, k_cache + kv_head * DIM, v_cache + kv_head * DIM,
        block_tables + request * table_stride.to(tl.int64), begin, end, oldest, past, qk_scale,
        softcap, KV_HEADS * DIM, DIM, DIM_PAD, BLOCK_SIZE, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    start = out + token.to(tl.int64) * out_token + first_head * out_head
    own_sinks = None if sinks is None else sinks + first_head
    _store_rows(
        acc, row_max, row_sum, v_scale, tokens, heads, is_row, split, num_splits,
        seq_len - first_key, length, partial, partial_lse, num_arrived,
        request.to(tl.int64) * KV_HEADS + kv_head, query_len, start, out_token, out_head,
        own_sinks, GROUP, QUERIES, DIM, DIM_PAD, BLOCK_M, ROW_PAD, AT_ONCE,
    )  # fmt: skip


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
