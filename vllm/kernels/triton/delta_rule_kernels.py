# mypy: ignore-errors
"""Device code of `delta_rule.py`: names in capitals are compile-time constants.

Tokens of request r are query_start_loc[r] and on. A request whose seq_len is no more than the
tokens it has in this step is fresh: it starts from zeros, whatever its slot holds.
"""

import triton
import triton.language as tl

from vllm.kernels.triton.moe_kernels import begin_dependent

NORM_EPS: tl.constexpr = tl.constexpr(1e-6)


@triton.jit
def _read_request(query_start_loc, seq_lens, state_slots, r):
    """First token, number of tokens, slot of the state, whether that counts."""
    start = tl.load(query_start_loc + r).to(tl.int32)
    length = tl.load(query_start_loc + r + 1).to(tl.int32) - start
    slot = tl.load(state_slots + r).to(tl.int64)
    return start, length, slot, tl.load(seq_lens + r) > length


# ---------------------------------------------------------------- convolution


@triton.jit(do_not_specialize=["num_requests"])
def conv_step_kernel(
    x, weight, state, state_slots, query_start_loc, seq_lens, out, num_requests, x_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Requests of one token: output and the state after it. Grid (requests, channel blocks)."""
    begin_dependent(PDL)
    start, length, slot, has_state = _read_request(
        query_start_loc, seq_lens, state_slots, tl.program_id(0)
    )
    if length != 1:
        return
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = c < CHANNELS
    wide = start.to(tl.int64)
    own = state + slot * ((TAPS - 1) * CHANNELS) + c
    new = tl.load(x + wide * x_stride + c, mask=is_channel, other=0.0)
    last = tl.load(weight + (TAPS - 1) * CHANNELS + c, mask=is_channel, other=0.0)
    acc = last * new.to(tl.float32)
    for tap in tl.static_range(TAPS - 1):
        kept = tl.load(own + tap * CHANNELS, mask=is_channel & has_state, other=0.0)
        w = tl.load(weight + tap * CHANNELS + c, mask=is_channel, other=0.0)
        acc += w * kept.to(tl.float32)
        if tap > 0:
            tl.store(own + (tap - 1) * CHANNELS, kept, mask=is_channel)
    tl.store(own + (TAPS - 2) * CHANNELS, new, mask=is_channel)
    y = acc / (1.0 + tl.exp(-acc))
    tl.store(out + wide * CHANNELS + c, y.to(out.dtype.element_ty), mask=is_channel)


@triton.jit(do_not_specialize=["num_tokens", "num_requests"])
def conv_tokens_kernel(
    x, weight, state, state_slots, query_start_loc, seq_lens, out, num_tokens, num_requests,
    x_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Outputs of requests of more tokens; states are left. Grid (token blocks, channel blocks)."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    request = tl.zeros([TOKENS], tl.int32)
    for first in range(0, num_requests, 32):
        r = first + tl.arange(0, 32)
        ends = tl.load(query_start_loc + r + 1, mask=r < num_requests, other=2147483647)
        request += tl.sum((ends[None, :] <= tokens[:, None]).to(tl.int32), 1)
    is_token = (tokens < num_tokens) & (request < num_requests)
    request = tl.minimum(request, num_requests - 1)
    start, length, slot, has_state = _read_request(query_start_loc, seq_lens, state_slots, request)
    is_token = is_token & (length > 1)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = c < CHANNELS
    acc = tl.zeros([TOKENS, BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        source = tokens - (TAPS - 1) + tap
        is_new = source >= start
        row = x + source.to(tl.int64)[:, None] * x_stride + c[None, :]
        new = tl.load(row, mask=(is_token & is_new)[:, None] & is_channel[None, :], other=0.0)
        place = tl.where(is_new, 0, TAPS - 1 + source - start)
        old = state + (slot * (TAPS - 1) + place)[:, None] * CHANNELS + c[None, :]
        is_old = (is_token & ~is_new & has_state)[:, None] & is_channel[None, :]
        kept = tl.load(old, mask=is_old, other=0.0)
        w = tl.load(weight + tap * CHANNELS + c, mask=is_channel, other=0.0)
        acc += w[None, :] * (new.to(tl.float32) + kept.to(tl.float32))
    y = acc / (1.0 + tl.exp(-acc))
    target = out + tokens.to(tl.int64)[:, None] * CHANNELS + c[None, :]
    tl.store(target, y.to(out.dtype.element_ty), mask=is_token[:, None] & is_channel[None, :])


@triton.jit(do_not_specialize=["num_requests"])
def conv_state_kernel(
    x, state, state_slots, query_start_loc, seq_lens, num_requests, x_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """States after requests of more than one token. Grid (requests, channel blocks)."""
    start, length, slot, has_state = _read_request(
        query_start_loc, seq_lens, state_slots, tl.program_id(0)
    )
    if length <= 1:
        return
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = state + slot * ((TAPS - 1) * CHANNELS) + c
    # In ascending order, so that a row is read before it is written.
    for place in tl.static_range(TAPS - 1):
        token = length - (TAPS - 1) + place
        row = x + (start + token).to(tl.int64) * x_stride + c
        new = tl.load(row, mask=(c < CHANNELS) & (token >= 0), other=0.0)
        moved = own + tl.maximum(TAPS - 1 + token, 0) * CHANNELS
        kept = tl.load(moved, mask=(c < CHANNELS) & (token < 0) & has_state, other=0.0)
        tl.store(own + place * CHANNELS, new + kept, mask=c < CHANNELS)


# ---------------------------------------------------------------- recurrence


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _gates(a, b, decay_rate, dt_bias, tokens, head, gate_stride, is_token):
    """log of the decay and beta of tokens; tokens that are not there change nothing."""
    at = tokens.to(tl.int64) * gate_stride + head
    dt = tl.load(a + at, mask=is_token, other=0.0).to(tl.float32) + tl.load(dt_bias + head)
    log_decay = tl.where(is_token, -tl.load(decay_rate + head) * _softplus(dt), 0.0)
    beta = 1.0 / (1.0 + tl.exp(-tl.load(b + at, mask=is_token, other=0.0).to(tl.float32)))
    return log_decay, tl.where(is_token, beta, 0.0)


@triton.jit(do_not_specialize=["num_requests"])
def step_kernel(
    q, k, v, a, b, decay_rate, dt_bias, state, state_slots, query_start_loc, seq_lens, out,
    q_stride, k_stride, v_stride, gate_stride, num_requests,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr,
    V: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Requests of one token. Grid (blocks of a value head, heads, requests)."""
    begin_dependent(PDL)
    block, head, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, length, slot, has_state = _read_request(query_start_loc, seq_lens, state_slots, r)
    if length != 1:
        return
    i, j = tl.arange(0, K_PAD), block * BLOCK_V + tl.arange(0, BLOCK_V)
    is_i, is_j = i < K, j < V
    own = state + (slot * HEADS + head) * (K * V) + i[:, None] * V + j[None, :]
    is_own = is_i[:, None] & is_j[None, :]
    memory = tl.load(own, mask=is_own & has_state, other=0.0)
    wide = start.to(tl.int64)
    at = (head // GROUP) * K + i
    query = tl.load(q + wide * q_stride + at, mask=is_i, other=0.0).to(tl.float32)
    key = tl.load(k + wide * k_stride + at, mask=is_i, other=0.0).to(tl.float32)
    query *= tl.rsqrt(tl.sum(query * query, 0) + NORM_EPS) * K**-0.5
    key *= tl.rsqrt(tl.sum(key * key, 0) + NORM_EPS)
    value = tl.load(v + wide * v_stride + head * V + j, mask=is_j, other=0.0).to(tl.float32)
    log_decay, beta = _gates(a, b, decay_rate, dt_bias, start, head, gate_stride, True)
    memory *= tl.exp(log_decay)
    delta = (value - tl.sum(memory * key[:, None], 0)) * beta
    memory += key[:, None] * delta[None, :]
    tl.store(own, memory, mask=is_own)
    y = tl.sum(memory * query[:, None], 0)
    tl.store(out + (wide * HEADS + head) * V + j, y.to(out.dtype.element_ty), mask=is_j)


@triton.jit
def _load_unit(x, tokens, is_token, head, stride, K: tl.constexpr, K_PAD: tl.constexpr):
    """Rows [tokens, K_PAD] of one head, each of length one."""
    i = tl.arange(0, K_PAD)
    pointers = x + tokens.to(tl.int64)[:, None] * stride + head * K + i[None, :]
    rows = tl.load(pointers, mask=is_token[:, None] & (i < K)[None, :], other=0.0).to(tl.float32)
    return rows * tl.rsqrt(tl.sum(rows * rows, 1) + NORM_EPS)[:, None]


@triton.jit
def _find_chunk(query_start_loc, index, num_requests, R_PAD: tl.constexpr, CHUNK: tl.constexpr):
    """The request that chunk `index` belongs to, num_requests for none, and its first chunk.

    Chunks are counted over the requests of more than one token.
    """
    r = tl.arange(0, R_PAD)
    begin = tl.load(query_start_loc + r, mask=r < num_requests, other=0)
    end = tl.load(query_start_loc + r + 1, mask=r < num_requests, other=0)
    length = (end - begin).to(tl.int32)
    count = tl.where(length > 1, tl.cdiv(length, CHUNK), 0)
    last = tl.cumsum(count, 0)
    request = tl.sum((last <= index).to(tl.int32), 0)
    first = tl.sum(tl.where(r == request, last - count, 0), 0)
    return tl.where(index < tl.sum(count, 0), request, num_requests), first


@triton.jit
def _inner_products(
    q, k, tokens, is_token, head, q_stride, k_stride,
    K: tl.constexpr, K_PAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """k_i.k_j and q_i.k_j of unit keys, and queries of length 1 / sqrt(K). A part of the columns at
    a time, and lengths last: TF32 holds half precision exactly."""
    PART: tl.constexpr = 64 if K_PAD > 64 else K_PAD
    PRECISION: tl.constexpr = "tf32x3" if k.dtype.element_ty == tl.float32 else "tf32"
    keys = tl.zeros([CHUNK, CHUNK], tl.float32)
    overlaps = tl.zeros([CHUNK, CHUNK], tl.float32)
    key_squares = tl.zeros([CHUNK], tl.float32)
    query_squares = tl.zeros([CHUNK], tl.float32)
    wide = tokens.to(tl.int64)[:, None]
    for part in tl.static_range(K_PAD // PART):
        i = part * PART + tl.arange(0, PART)
        is_loaded = is_token[:, None] & (i < K)[None, :]
        at = head * K + i[None, :]
        key = tl.load(k + wide * k_stride + at, mask=is_loaded, other=0.0).to(tl.float32)
        query = tl.load(q + wide * q_stride + at, mask=is_loaded, other=0.0).to(tl.float32)
        key_squares += tl.sum(key * key, 1)
        query_squares += tl.sum(query * query, 1)
        keys = tl.dot(key, tl.trans(key), keys, input_precision=PRECISION)
        overlaps = tl.dot(query, tl.trans(key), overlaps, input_precision=PRECISION)
    of_key = tl.rsqrt(key_squares + NORM_EPS)
    of_query = tl.rsqrt(query_squares + NORM_EPS) * K**-0.5
    return keys * of_key[:, None] * of_key[None, :], overlaps * of_query[:, None] * of_key[None, :]


@triton.jit(do_not_specialize=["num_requests"])
def solve_kernel(
    q, k, a, b, decay_rate, dt_bias, query_start_loc, inverse, scores, q_stride, k_stride,
    gate_stride, num_requests,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr,
    R_PAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """What of a chunk does not wait for the one before it. Grid (chunks, heads).

    With D[i, j] the decay between tokens j and i: inverse[chunk, head] of I + beta_i D[i, j]
    k_i.k_j (j < i), row by row, since each is minus the sum of those before it by the row of the
    system; and scores[chunk, head] = D[i, j] q_i.k_j (j <= i).
    """
    index, head = tl.program_id(0), tl.program_id(1)
    r, first = _find_chunk(query_start_loc, index, num_requests, R_PAD, CHUNK)
    if r >= num_requests:
        return
    rows = tl.arange(0, CHUNK)
    tokens = tl.load(query_start_loc + r).to(tl.int32) + (index - first) * CHUNK + rows
    is_token = tokens < tl.load(query_start_loc + r + 1)
    log_decay, beta = _gates(a, b, decay_rate, dt_bias, tokens, head, gate_stride, is_token)
    since = tl.cumsum(log_decay, 0)
    is_seen = rows[:, None] >= rows[None, :]
    is_self = rows[:, None] == rows[None, :]
    between = tl.exp(tl.where(is_seen, since[:, None] - since[None, :], float("-inf")))
    square = (index * HEADS + head).to(tl.int64) * (CHUNK * CHUNK)
    square += rows[:, None] * CHUNK + rows[None, :]
    products, overlaps = _inner_products(
        q, k, tokens, is_token, head // GROUP, q_stride, k_stride, K, K_PAD, CHUNK
    )
    tl.store(scores + square, overlaps * between)
    system = tl.where(is_self, 0.0, products * between * beta[:, None])
    solved = is_self.to(tl.float32)
    for row in range(1, CHUNK):
        is_row = (rows == row)[:, None]
        factors = tl.sum(tl.where(is_row, system, 0.0), 0)
        sums = tl.sum(factors[:, None] * solved, 0)
        solved = tl.where(is_row, solved - sums[None, :], solved)
    tl.store(inverse + square, solved)


@triton.jit(do_not_specialize=["num_requests"])
def chunk_kernel(
    q, k, v, a, b, decay_rate, dt_bias, state, state_slots, query_start_loc, seq_lens, inverse,
    scores, out, q_stride, k_stride, v_stride, gate_stride, num_requests,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr,
    V: tl.constexpr, BLOCK_V: tl.constexpr, R_PAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Requests of more than one token, chunk after chunk. Grid (blocks of a value head, heads,
    requests)."""
    block, head, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, length, slot, has_state = _read_request(query_start_loc, seq_lens, state_slots, r)
    if length <= 1:
        return
    others = tl.arange(0, R_PAD)
    before = others < r
    begins = tl.load(query_start_loc + others, mask=before, other=0)
    lengths = (tl.load(query_start_loc + others + 1, mask=before, other=0) - begins).to(tl.int32)
    first = tl.sum(tl.where(lengths > 1, tl.cdiv(lengths, CHUNK), 0), 0)
    rows, i = tl.arange(0, CHUNK), tl.arange(0, K_PAD)
    j = block * BLOCK_V + tl.arange(0, BLOCK_V)
    own = state + (slot * HEADS + head) * (K * V) + i[:, None] * V + j[None, :]
    is_own = (i < K)[:, None] & (j < V)[None, :]
    memory = tl.load(own, mask=is_own & has_state, other=0.0)
    for chunk in range(tl.cdiv(length, CHUNK)):
        tokens = start + chunk * CHUNK + rows
        is_token = tokens < start + length
        log_decay, beta = _gates(a, b, decay_rate, dt_bias, tokens, head, gate_stride, is_token)
        since = tl.cumsum(log_decay, 0)
        whole = tl.sum(log_decay, 0)
        grown = tl.exp(since)[:, None]
        keys = _load_unit(k, tokens, is_token, head // GROUP, k_stride, K, K_PAD)
        is_value = is_token[:, None] & (j < V)[None, :]
        at = tokens.to(tl.int64)[:, None] * v_stride + head * V + j[None, :]
        values = tl.load(v + at, mask=is_value, other=0.0).to(tl.float32)
        square = ((first + chunk) * HEADS + head).to(tl.int64) * (CHUNK * CHUNK)
        square += rows[:, None] * CHUNK + rows[None, :]
        wanted = (values - tl.dot(keys * grown, memory)) * beta[:, None]
        delta = tl.dot(tl.load(inverse + square), wanted)
        queries = _load_unit(q, tokens, is_token, head // GROUP, q_stride, K, K_PAD) * K**-0.5
        y = tl.dot(queries * grown, memory)
        y = tl.dot(tl.load(scores + square), delta, y)
        target = out + (tokens.to(tl.int64) * HEADS + head)[:, None] * V + j[None, :]
        tl.store(target, y.to(out.dtype.element_ty), mask=is_value)
        left = keys * tl.exp(whole - since)[:, None]
        memory = tl.dot(tl.trans(left), delta, memory * tl.exp(whole))
    tl.store(own, memory, mask=is_own)
