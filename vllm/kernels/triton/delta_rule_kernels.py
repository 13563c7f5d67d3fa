# mypy: ignore-errors
"""Device code of `delta_rule.py`: names in capitals are compile-time constants.

Tokens of request r are query_start_loc[r] and on. A request whose seq_len is no more than the
tokens it has in this step is fresh: it starts from zeros, whatever its slot holds. draft_slots is
None where no request has draft tokens; else it gives for each token the slot of the state after it,
-1 for one that is no draft.
"""

import triton
import triton.language as tl

from vllm.kernels.triton.moe_kernels import begin_dependent

NORM_EPS: tl.constexpr = tl.constexpr(1e-6)
# Most tokens of a request in a step that are computed one after the other, at about a microsecond
# each. Chunks would take two more launches, and pad a matrix product of 64 tokens.
BY_TOKEN: tl.constexpr = tl.constexpr(8)


@triton.jit
def read_request(query_start_loc, seq_lens, state_slots, r):
    """First token, number of tokens, slot of the state, whether that counts."""
    start = tl.load(query_start_loc + r).to(tl.int32)
    length = tl.load(query_start_loc + r + 1).to(tl.int32) - start
    slot = tl.load(state_slots + r).to(tl.int64)
    return start, length, slot, tl.load(seq_lens + r) > length


@triton.jit
def is_by_token(draft_slots, start, length):
    """Whether a request is computed token by token: it has few, or drafts at its end. It does not
    depend on other requests."""
    found = (length >= 1) & (length <= BY_TOKEN)
    if draft_slots is not None:
        found |= tl.load(draft_slots + start + length - 1, mask=length > 0, other=-1) >= 0
    return found


@triton.jit
def slot_after(draft_slots, token, end, slot):
    """Where the state after a token goes of a request in `slot` that is computed by token, before
    token `end`; -1 of one that neither is a draft nor the last before drafts or of all."""
    is_kept = token + 1 == end
    if draft_slots is not None:
        drafted = tl.load(draft_slots + token).to(tl.int64)
        slot = tl.where(drafted >= 0, drafted, slot)
        is_kept |= tl.load(draft_slots + token + 1, mask=token + 1 < end, other=-1) >= 0
    return tl.where(is_kept, slot, -1)


# ---------------------------------------------------------------- convolution


@triton.jit(do_not_specialize=["num_requests"])
def conv_step_kernel(
    x, weight, bias, state, state_slots, query_start_loc, seq_lens, draft_slots, out, num_requests,
    x_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, IS_DECODE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Requests that are computed by token: outputs, and the states after them. Grid (requests,
    channel blocks)."""
    begin_dependent(PDL)
    start, length, slot, has_state = read_request(
        query_start_loc, seq_lens, state_slots, tl.program_id(0)
    )
    if not is_by_token(draft_slots, start, length):
        return
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = c < CHANNELS
    own = state + slot * ((TAPS - 1) * CHANNELS) + c
    window = ()  # the last inputs, oldest first
    for tap in tl.static_range(TAPS - 1):
        kept = tl.load(own + tap * CHANNELS, mask=is_channel & has_state, other=0.0)
        window = window + (kept,)  # noqa: RUF005
    for t in range(1 if IS_DECODE else length):
        token = start + t
        wide = token.to(tl.int64)
        new = tl.load(x + wide * x_stride + c, mask=is_channel, other=0.0)
        last = tl.load(weight + (TAPS - 1) * CHANNELS + c, mask=is_channel, other=0.0)
        acc = last * new.to(tl.float32)
        for tap in tl.static_range(TAPS - 1):
            w = tl.load(weight + tap * CHANNELS + c, mask=is_channel, other=0.0)
            acc += w * window[tap].to(tl.float32)
        window = window[1:] + (new,)  # noqa: RUF005
        target = slot_after(draft_slots, token, start + length, slot)
        place = state + target * ((TAPS - 1) * CHANNELS) + c
        for tap in tl.static_range(TAPS - 1):
            tl.store(place + tap * CHANNELS, window[tap], mask=is_channel & (target >= 0))
        if bias is not None:
            acc += tl.load(bias + c, mask=is_channel, other=0.0)
        y = acc / (1.0 + tl.exp(-acc))
        tl.store(out + wide * CHANNELS + c, y.to(out.dtype.element_ty), mask=is_channel)


@triton.jit(do_not_specialize=["num_tokens", "num_requests"])
def conv_tokens_kernel(
    x, weight, bias, state, state_slots, query_start_loc, seq_lens, draft_slots, out, num_tokens,
    num_requests, x_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Outputs of requests that are not computed by token; states are left. Grid (token blocks,
    channel blocks)."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    request = tl.zeros([TOKENS], tl.int32)
    for first in range(0, num_requests, 32):
        r = first + tl.arange(0, 32)
        ends = tl.load(query_start_loc + r + 1, mask=r < num_requests, other=2147483647)
        request += tl.sum((ends[None, :] <= tokens[:, None]).to(tl.int32), 1)
    is_token = (tokens < num_tokens) & (request < num_requests)
    request = tl.minimum(request, num_requests - 1)
    start, length, slot, has_state = read_request(query_start_loc, seq_lens, state_slots, request)
    is_token = is_token & ~is_by_token(draft_slots, start, length)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = c < CHANNELS
    acc = tl.zeros([TOKENS, BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        source = tokens - (TAPS - 1) + tap
        row = x + source.to(tl.int64)[:, None] * x_stride + c[None, :]
        is_new = (is_token & (source >= start))[:, None] & is_channel[None, :]
        w = tl.load(weight + tap * CHANNELS + c, mask=is_channel, other=0.0)
        acc += w[None, :] * tl.load(row, mask=is_new, other=0.0).to(tl.float32)
    # Few blocks reach back before the begin of a request.
    if tl.max((is_token & (tokens - (TAPS - 1) < start)).to(tl.int32), 0) > 0:
        for tap in tl.static_range(TAPS - 1):
            place = tokens - start + tap
            old = state + (slot * (TAPS - 1) + place)[:, None] * CHANNELS + c[None, :]
            is_old = is_token & (place < TAPS - 1) & has_state
            w = tl.load(weight + tap * CHANNELS + c, mask=is_channel, other=0.0)
            kept = tl.load(old, mask=is_old[:, None] & is_channel[None, :], other=0.0)
            acc += w[None, :] * kept.to(tl.float32)
    if bias is not None:
        acc += tl.load(bias + c, mask=is_channel, other=0.0)[None, :]
    y = acc / (1.0 + tl.exp(-acc))
    target = out + tokens.to(tl.int64)[:, None] * CHANNELS + c[None, :]
    tl.store(target, y.to(out.dtype.element_ty), mask=is_token[:, None] & is_channel[None, :])


@triton.jit
def conv_state_kernel(
    x, state, state_slots, query_start_loc, seq_lens, draft_slots, x_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """States after requests that are not computed by token, whose tokens are as many as taps and
    more. Grid (requests, channel blocks)."""
    start, length, slot, _ = read_request(query_start_loc, seq_lens, state_slots, tl.program_id(0))
    if is_by_token(draft_slots, start, length) | (length == 0):
        return
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = x + (start + length - (TAPS - 1)).to(tl.int64) * x_stride + c
    own = state + slot * ((TAPS - 1) * CHANNELS) + c
    for tap in tl.static_range(TAPS - 1):
        kept = tl.load(row + tap * x_stride, mask=c < CHANNELS, other=0.0)
        tl.store(own + tap * CHANNELS, kept, mask=c < CHANNELS)


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
    q, k, v, a, b, decay_rate, dt_bias, state, state_slots, query_start_loc, seq_lens, draft_slots,
    out, q_stride, k_stride, v_stride, gate_stride, num_requests,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr,
    V: tl.constexpr, BLOCK_V: tl.constexpr, IS_DECODE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Requests that are computed by token. Grid (blocks of a value head, heads, requests)."""
    begin_dependent(PDL)
    block, head, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, length, slot, has_state = read_request(query_start_loc, seq_lens, state_slots, r)
    if not is_by_token(draft_slots, start, length):
        return
    i, j = tl.arange(0, K_PAD), block * BLOCK_V + tl.arange(0, BLOCK_V)
    is_i, is_j = i < K, j < V
    at = i[:, None] * V + j[None, :]
    is_own = is_i[:, None] & is_j[None, :]
    own = state + (slot * HEADS + head) * (K * V) + at
    memory = tl.load(own, mask=is_own & has_state, other=0.0)
    of_key = (head // GROUP) * K + i
    for t in range(1 if IS_DECODE else length):
        token = start + t
        wide = token.to(tl.int64)
        query = tl.load(q + wide * q_stride + of_key, mask=is_i, other=0.0).to(tl.float32)
        key = tl.load(k + wide * k_stride + of_key, mask=is_i, other=0.0).to(tl.float32)
        query *= tl.rsqrt(tl.sum(query * query, 0) + NORM_EPS) * K**-0.5
        key *= tl.rsqrt(tl.sum(key * key, 0) + NORM_EPS)
        value = tl.load(v + wide * v_stride + head * V + j, mask=is_j, other=0.0).to(tl.float32)
        log_decay, beta = _gates(a, b, decay_rate, dt_bias, token, head, gate_stride, True)
        memory *= tl.exp(log_decay)
        delta = (value - tl.sum(memory * key[:, None], 0)) * beta
        memory += key[:, None] * delta[None, :]
        target = slot_after(draft_slots, token, start + length, slot)
        place = state + (target * HEADS + head) * (K * V) + at
        tl.store(place, memory, mask=is_own & (target >= 0))
        y = tl.sum(memory * query[:, None], 0)
        tl.store(out + (wide * HEADS + head) * V + j, y.to(out.dtype.element_ty), mask=is_j)


@triton.jit
def _load_rows(x, rows, stride, part, SIZE: tl.constexpr, PART: tl.constexpr):
    """Columns [part * PART, (part + 1) * PART) of rows of SIZE numbers, then zeros."""
    i = part * PART + tl.arange(0, PART)
    pointers = x + (rows[:, None] * stride + i[None, :])
    if SIZE % PART == 0:
        return tl.load(pointers).to(tl.float32)
    return tl.load(pointers, mask=(i < SIZE)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _count_chunks(query_start_loc, draft_slots, requests, is_counted, CHUNK: tl.constexpr):
    """Of each request: none of one that is computed by token."""
    begin = tl.load(query_start_loc + requests, mask=is_counted, other=0).to(tl.int32)
    end = tl.load(query_start_loc + requests + 1, mask=is_counted, other=0).to(tl.int32)
    length = end - begin
    return tl.where(is_by_token(draft_slots, begin, length), 0, tl.cdiv(length, CHUNK))


@triton.jit
def _find_chunk(
    query_start_loc, draft_slots, index, num_requests, R_PAD: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """The request that chunk `index` belongs to, num_requests for none, and its first chunk."""
    r = tl.arange(0, R_PAD)
    count = _count_chunks(query_start_loc, draft_slots, r, r < num_requests, CHUNK)
    last = tl.cumsum(count, 0)
    request = tl.sum((last <= index).to(tl.int32), 0)
    first = tl.sum(tl.where(r == request, last - count, 0), 0)
    return tl.where(index < tl.sum(count, 0), request, num_requests), first


@triton.jit
def _inner_products(
    q, k, rows, q_stride, k_stride, K: tl.constexpr, K_PAD: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """k_i.k_j and q_i.k_j, and what makes k_i of length one and q_i of 1 / sqrt(K). A part of the
    columns at a time, and lengths apart: TF32 holds half precision exactly."""
    PART: tl.constexpr = 64 if K_PAD > 64 else K_PAD
    PRECISION: tl.constexpr = "tf32x3" if k.dtype.element_ty == tl.float32 else "tf32"
    keys = tl.zeros([CHUNK, CHUNK], tl.float32)
    overlaps = tl.zeros([CHUNK, CHUNK], tl.float32)
    key_squares = tl.zeros([CHUNK], tl.float32)
    query_squares = tl.zeros([CHUNK], tl.float32)
    for part in range(K_PAD // PART):
        key = _load_rows(k, rows, k_stride, part, K, PART)
        query = _load_rows(q, rows, q_stride, part, K, PART)
        key_squares += tl.sum(key * key, 1)
        query_squares += tl.sum(query * query, 1)
        keys = tl.dot(key, tl.trans(key), keys, input_precision=PRECISION)
        overlaps = tl.dot(query, tl.trans(key), overlaps, input_precision=PRECISION)
    of_key = tl.rsqrt(key_squares + NORM_EPS)
    return keys, overlaps, of_key, tl.rsqrt(query_squares + NORM_EPS) * K**-0.5


@triton.jit
def _dot(a, b):
    """Products that keep the digits of float32."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _apply(inverse, rows):
    """Products with rows of half precision, which TF32 holds exactly. The inverse takes two: what
    its own rounding leaves of elements that cancel is the same for all tokens that are alike."""
    high = inverse.to(tl.bfloat16).to(tl.float32)
    return tl.dot(high, rows, tl.dot(inverse - high, rows))


@triton.jit
def _invert(system, CHUNK: tl.constexpr):
    """Inverse of I + system, which is strictly lower triangular.

    Its blocks of 16 x 16 on the diagonal all together, row by row, since each is minus the sum of
    those before it by the row of the system; then of twice and four times the size:
    inverse [[A, 0], [C, B]] = [[A', 0], [-B' C A', B']].
    """
    SIDE: tl.constexpr = 16
    BLOCKS: tl.constexpr = CHUNK // SIDE
    rows, within = tl.arange(0, CHUNK), tl.arange(0, SIDE)
    is_own = (rows[:, None] // SIDE == tl.arange(0, BLOCKS)[None, :])[:, :, None]
    blocks = tl.sum(tl.where(is_own, tl.reshape(system, [CHUNK, BLOCKS, SIDE]), 0.0), 1)
    blocks = tl.reshape(blocks, [BLOCKS, SIDE, SIDE])
    solved = tl.where(within[:, None] == within[None, :], 1.0, 0.0)
    solved = tl.broadcast_to(solved[None, :, :], [BLOCKS, SIDE, SIDE])
    for row in range(1, SIDE):
        is_row = (within == row)[None, :, None]
        factors = tl.sum(tl.where(is_row, blocks, 0.0), 1)
        sums = tl.sum(factors[:, :, None] * solved, 1)
        solved = tl.where(is_row, solved - sums[:, None, :], solved)
    inverse = tl.where(is_own, tl.reshape(solved, [CHUNK, SIDE])[:, None, :], 0.0)
    inverse = tl.reshape(inverse, [CHUNK, CHUNK])
    side = SIDE
    while side < CHUNK:
        i, j = rows[:, None] // side, rows[None, :] // side
        below = tl.where((i // 2 == j // 2) & (i != j), system, 0.0)
        inverse -= _dot(_dot(inverse, below), inverse)
        side *= 2
    return inverse


@triton.jit
def _to_half(x):
    """x / unit in half precision, and unit: the digits of TF32, at twice its rate, and tensor cores
    take the other operand as it is stored."""
    unit = tl.maximum(tl.max(tl.abs(x)), 1e-30) * 2.0**-14
    return (x * (1.0 / unit)).to(tl.float16), unit


@triton.jit(do_not_specialize=["num_requests"])
def solve_kernel(
    q, k, v, a, b, decay_rate, dt_bias, query_start_loc, draft_slots, operands, scores,
    from_values, decays, q_stride, k_stride, v_stride, gate_stride, num_requests,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr,
    V: tl.constexpr, V_PAD: tl.constexpr, R_PAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """What of a chunk does not wait for the one before it. Grid (chunks, heads).

    With D[i, j] the decay between tokens j and i, g that since the chunk's begin, h that to its
    end, and X the inverse of I + beta_i D[i, j] k_i.k_j (j < i), for each chunk and head: operands
    X (beta g k), by which deltas follow the state, g q, and h k; scores D[i, j] q_i.k_j (j <= i);
    from_values X (beta v); decays that of the whole chunk. Rows of operands have lengths of at
    most one, where half precision has the digits of TF32.
    """
    index, head = tl.program_id(0), tl.program_id(1)
    r, first = _find_chunk(query_start_loc, draft_slots, index, num_requests, R_PAD, CHUNK)
    if r >= num_requests:
        return
    rows = tl.arange(0, CHUNK)
    begin = tl.load(query_start_loc + r).to(tl.int32) + (index - first) * CHUNK
    left = tl.load(query_start_loc + r + 1).to(tl.int32) - begin
    gates = _gates(a, b, decay_rate, dt_bias, begin + rows, head, gate_stride, rows < left)
    log_decay, beta = gates
    since, whole = tl.cumsum(log_decay, 0), tl.sum(log_decay, 0)
    grown = tl.exp(since)
    begin = begin.to(tl.int64)
    q += begin * q_stride + (head // GROUP) * K
    k += begin * k_stride + (head // GROUP) * K
    v += begin * v_stride + head * V
    loaded = tl.minimum(rows, left - 1)
    products, overlaps, of_key, of_query = _inner_products(
        q, k, loaded, q_stride, k_stride, K, K_PAD, CHUNK
    )
    chunk = (index * HEADS + head).to(tl.int64)
    tl.store(decays + chunk, tl.exp(whole))
    is_seen = rows[:, None] >= rows[None, :]
    between = tl.exp(tl.where(is_seen, since[:, None] - since[None, :], float("-inf")))
    between *= of_key[None, :]
    seen = overlaps * between * of_query[:, None]
    square = rows[:, None] * CHUNK + rows[None, :]
    tl.store(scores + chunk * (CHUNK * CHUNK) + square, seen.to(tl.float16))
    system = products * between * (beta * of_key)[:, None]
    inverse = _invert(tl.where(rows[:, None] == rows[None, :], 0.0, system), CHUNK)
    inverse *= beta[None, :]
    for part in range(V_PAD // CHUNK):
        value = _load_rows(v, loaded, v_stride, part, V, CHUNK)
        at = rows[:, None] * V_PAD + (part * CHUNK + rows)[None, :]
        tl.store(from_values + chunk * (CHUNK * V_PAD) + at, _apply(inverse, value))
    inverse *= (grown * of_key)[None, :]
    of_query *= grown
    of_key *= tl.exp(whole - since)
    operands += chunk * (3 * CHUNK * K_PAD)
    PART: tl.constexpr = CHUNK if K_PAD > CHUNK else K_PAD
    for part in range(K_PAD // PART):
        key = _load_rows(k, loaded, k_stride, part, K, PART)
        query = _load_rows(q, loaded, q_stride, part, K, PART)
        at = rows[:, None] * K_PAD + (part * PART + tl.arange(0, PART))[None, :]
        tl.store(operands + at, _apply(inverse, key).to(tl.float16))
        tl.store(operands + CHUNK * K_PAD + at, (query * of_query[:, None]).to(tl.float16))
        tl.store(operands + 2 * CHUNK * K_PAD + at, (key * of_key[:, None]).to(tl.float16))


@triton.jit(do_not_specialize=["num_requests"])
def chunk_kernel(
    state, state_slots, query_start_loc, seq_lens, draft_slots, operands, scores, from_values,
    decays, out, num_requests,
    HEADS: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, V: tl.constexpr,
    V_PAD: tl.constexpr, BLOCK_V: tl.constexpr, R_PAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Requests that are not computed by token, chunk after chunk. Grid (blocks of a value head,
    heads, requests)."""
    block, head, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, length, slot, has_state = read_request(query_start_loc, seq_lens, state_slots, r)
    if is_by_token(draft_slots, start, length) | (length == 0):
        return
    others = tl.arange(0, R_PAD)
    first = tl.sum(_count_chunks(query_start_loc, draft_slots, others, others < r, CHUNK), 0)
    rows, i = tl.arange(0, CHUNK), tl.arange(0, K_PAD)
    j = block * BLOCK_V + tl.arange(0, BLOCK_V)
    own = state + (slot * HEADS + head) * (K * V) + i[:, None] * V + j[None, :]
    is_own = (i < K)[:, None] & (j < V)[None, :]
    memory = tl.load(own, mask=is_own & has_state, other=0.0)
    at = rows[:, None] * K_PAD + i[None, :]
    square = rows[:, None] * CHUNK + rows[None, :]
    for chunk in range(tl.cdiv(length, CHUNK)):
        index = ((first + chunk) * HEADS + head).to(tl.int64)
        own_operands = operands + index * (3 * CHUNK * K_PAD)
        decay = tl.load(decays + index)
        half, unit = _to_half(memory)
        delta = tl.load(
            from_values + index * (CHUNK * V_PAD) + (rows[:, None] * V_PAD + j[None, :])
        )
        delta -= tl.dot(tl.load(own_operands + at), half) * unit
        y = tl.dot(tl.load(own_operands + CHUNK * K_PAD + at), half) * unit
        half, unit = _to_half(delta)
        y += tl.dot(tl.load(scores + index * (CHUNK * CHUNK) + square), half) * unit
        key = tl.load(own_operands + 2 * CHUNK * K_PAD + at)
        memory = memory * decay + tl.dot(tl.trans(key), half) * unit
        begin = (start + chunk * CHUNK).to(tl.int64)
        target = out + (begin * HEADS + head) * V + (rows[:, None] * (HEADS * V) + j[None, :])
        is_value = (chunk * CHUNK + rows < length)[:, None] & (j < V)[None, :]
        tl.store(target, y.to(out.dtype.element_ty), mask=is_value)
    tl.store(own, memory, mask=is_own)
