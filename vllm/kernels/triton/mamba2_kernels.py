# mypy: ignore-errors
"""Device code of `mamba2.py`: names in capitals are compile-time constants. Requests are given as
in `delta_rule_kernels.py`."""

import triton
import triton.language as tl

from vllm.kernels.triton.delta_rule_kernels import is_by_token, read_request, slot_after
from vllm.kernels.triton.moe_kernels import begin_dependent


@triton.jit
def _softplus(x):
    """Small steps keep their digits: 1 + exp(x) would lose them."""
    power = tl.exp(tl.minimum(x, 20.0))
    small = power * (1.0 - 0.5 * power)
    return tl.where(x > 20.0, x, tl.where(power < 1e-2, small, tl.log(1.0 + power)))


@triton.jit
def _steps(dt, dt_bias, tokens, head, stride, least, most, is_token):
    """Of tokens; those that are not there take none, and change nothing."""
    given = tl.load(dt + tokens.to(tl.int64) * stride + head, mask=is_token, other=0.0)
    steps = _softplus(given.to(tl.float32) + tl.load(dt_bias + head))
    return tl.where(is_token, tl.minimum(tl.maximum(steps, least), most), 0.0)


@triton.jit(do_not_specialize=["least", "most"])
def step_kernel(
    x, dt, b, c, decay_rate, dt_bias, skip, state, state_slots, query_start_loc, seq_lens,
    draft_slots, out, x_stride, dt_stride, b_stride, c_stride, least, most,
    HEADS: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr,
    P: tl.constexpr, BLOCK_P: tl.constexpr, IS_DECODE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Requests that are computed by token. Grid (blocks of a head, heads, requests)."""
    begin_dependent(PDL)
    block, head, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, length, slot, has_state = read_request(query_start_loc, seq_lens, state_slots, r)
    if not is_by_token(draft_slots, start, length):
        return
    i, j = tl.arange(0, N_PAD), block * BLOCK_P + tl.arange(0, BLOCK_P)
    is_i, is_j = i < N, j < P
    at = i[:, None] * P + j[None, :]
    is_own = is_i[:, None] & is_j[None, :]
    own = state + (slot * HEADS + head) * (N * P) + at
    memory = tl.load(own, mask=is_own & has_state, other=0.0)
    of_key = (head // GROUP) * N + i
    for t in range(1 if IS_DECODE else length):
        token = start + t
        wide = token.to(tl.int64)
        key = tl.load(b + wide * b_stride + of_key, mask=is_i, other=0.0).to(tl.float32)
        query = tl.load(c + wide * c_stride + of_key, mask=is_i, other=0.0).to(tl.float32)
        value = tl.load(x + wide * x_stride + head * P + j, mask=is_j, other=0.0).to(tl.float32)
        step = _steps(dt, dt_bias, token, head, dt_stride, least, most, True)
        memory *= tl.exp(-tl.load(decay_rate + head) * step)
        memory += key[:, None] * (step * value)[None, :]
        target = slot_after(draft_slots, token, start + length, slot)
        place = state + (target * HEADS + head) * (N * P) + at
        tl.store(place, memory, mask=is_own & (target >= 0))
        y = tl.sum(memory * query[:, None], 0) + tl.load(skip + head) * value
        tl.store(out + (wide * HEADS + head) * P + j, y.to(out.dtype.element_ty), mask=is_j)


@triton.jit
def _halves(x, TYPE: tl.constexpr):
    """x / unit as the sum of two of the type of activations, and unit: the digits of TF32 and more,
    at twice its rate, beside operands that are of that type as they are."""
    unit = tl.maximum(tl.max(tl.abs(x)), 1e-30) * 2.0**-14
    scaled = x * (1.0 / unit)
    high = scaled.to(TYPE)
    return high, (scaled - high.to(tl.float32)).to(TYPE), unit


@triton.jit(do_not_specialize=["least", "most"])
def chunk_kernel(
    x, dt, b, c, decay_rate, dt_bias, skip, state, state_slots, query_start_loc, seq_lens,
    draft_slots, out, x_stride, dt_stride, b_stride, c_stride, least, most,
    HEADS: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr,
    P: tl.constexpr, BLOCK_P: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Requests that are not computed by token, chunk after chunk. Grid (blocks of a head, heads,
    requests).

    Within a chunk, with g the decay since its begin, h that to its end, d the steps and S the state
    that enters it: y_i = sum over j <= i of (g_i / g_j) (c_i . b_j) d_j x_j + g_i S.T c_i + D x_i,
    and S becomes g_last S + sum of h_j d_j b_j (outer product) x_j.
    """
    TYPE: tl.constexpr = x.dtype.element_ty
    block, head, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, length, slot, has_state = read_request(query_start_loc, seq_lens, state_slots, r)
    if is_by_token(draft_slots, start, length) | (length == 0):
        return
    rows, i = tl.arange(0, CHUNK), tl.arange(0, N_PAD)
    j = block * BLOCK_P + tl.arange(0, BLOCK_P)
    own = state + (slot * HEADS + head) * (N * P) + i[:, None] * P + j[None, :]
    is_own = (i < N)[:, None] & (j < P)[None, :]
    memory = tl.load(own, mask=is_own & has_state, other=0.0)
    rate, share = tl.load(decay_rate + head), tl.load(skip + head)
    is_seen = rows[:, None] >= rows[None, :]
    b += (head // GROUP) * N
    c += (head // GROUP) * N
    for begin in range(0, length, CHUNK):
        is_token = begin + rows < length
        tokens = start + begin + rows
        wide = tokens.to(tl.int64)[:, None]
        is_row = is_token[:, None] & (i < N)[None, :]
        keys = tl.load(b + wide * b_stride + i[None, :], mask=is_row, other=0.0)
        queries = tl.load(c + wide * c_stride + i[None, :], mask=is_row, other=0.0)
        is_value = is_token[:, None] & (j < P)[None, :]
        at = wide * x_stride + head * P + j[None, :]
        values = tl.load(x + at, mask=is_value, other=0.0)
        steps = _steps(dt, dt_bias, tokens, head, dt_stride, least, most, is_token)
        since, whole = tl.cumsum(-rate * steps, 0), tl.sum(-rate * steps, 0)
        between = tl.exp(tl.where(is_seen, since[:, None] - since[None, :], float("-inf")))
        scores = tl.dot(queries, tl.trans(keys)) * between * steps[None, :]
        high, low, unit = _halves(scores, TYPE)
        y = tl.dot(low, values, tl.dot(high, values)) * unit
        high, low, unit = _halves(memory, TYPE)
        earlier = tl.dot(queries, low, tl.dot(queries, high)) * unit
        y += earlier * tl.exp(since)[:, None] + share * values.to(tl.float32)
        kept = keys.to(tl.float32) * (steps * tl.exp(whole - since))[:, None]
        high, low, unit = _halves(kept, TYPE)
        added = tl.dot(tl.trans(low), values, tl.dot(tl.trans(high), values)) * unit
        memory = memory * tl.exp(whole) + added
        target = out + (wide * HEADS + head) * P + j[None, :]
        tl.store(target, y.to(out.dtype.element_ty), mask=is_value)
    tl.store(own, memory, mask=is_own)
