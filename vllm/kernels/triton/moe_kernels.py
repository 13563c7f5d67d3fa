# mypy: ignore-errors
"""Device code of the products in `moe.py`: names in capitals are compile-time constants.

A tile is [BLOCK_N rows of a weight, BLOCK_M tokens of one expert]: with weights as the left operand
the tensor cores need at least 64 rows of them, and as few as 8 tokens. (Triton 3.6
takes wgmma from 16 on, and the older mma for 8.)

Rows of inputs past the last token of an expert are read at the place of its first, so that nothing
unwritten is read; the results of such rows are not stored.
"""

import triton
import triton.language as tl

try:  # from Triton 3.4 on
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    gdc_launch_dependents = gdc_wait = None

HAS_DEPENDENT_LAUNCH = gdc_wait is not None

GROUP: tl.constexpr = tl.constexpr(128)  # columns of a token that share a scale
FP8_MAX: tl.constexpr = tl.constexpr(448.0)
MIN_AMAX: tl.constexpr = tl.constexpr(1e-10)

# How tokens arrive.
PLAIN: tl.constexpr = tl.constexpr(0)  # in the type of the weights
TO_QUANTISE: tl.constexpr = tl.constexpr(1)  # in half precision, quantised here
QUANTISED: tl.constexpr = tl.constexpr(2)  # E4M3 with float32 scales [rows, groups]


@triton.jit
def begin_dependent(PDL: tl.constexpr):
    """Waits for the kernel before, and lets the one after be made ready to start.

    Every program of a kernel launched so calls this before it reads or writes what other kernels
    write or read, and before it returns: then each kernel ends after all those before it.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def quantise(x, AXIS: tl.constexpr):
    """E4M3 values and the float32 scale of each row (AXIS 1) or column (AXIS 0) of a tile.

    The conversion saturates, and keeps NaN.
    """
    amax = tl.maximum(tl.max(tl.abs(x), AXIS), MIN_AMAX)
    q = (x * tl.expand_dims(FP8_MAX / amax, AXIS)).to(tl.float8e4nv)
    return q, amax / FP8_MAX


@triton.jit
def silu_mul(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def activate(gate, up, LIMIT: tl.constexpr):
    """silu(gate) * up, or clamped at LIMIT what SWIGLUOAI of vllm.architectures.decoder says."""
    if LIMIT == 0:
        return silu_mul(gate, up)
    else:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)


@triton.jit
def _load(pointers, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns k.. of a tile; zeros past K."""
    if K % BLOCK_K == 0:
        return tl.load(pointers)
    return tl.load(pointers, mask=(k + tl.arange(0, BLOCK_K) < K)[None, :], other=0.0)


@triton.jit
def _scaled(part, w_scale, x_scale, IS_SCALAR: tl.constexpr):
    """part [BLOCK_N, BLOCK_M] times the scale of each weight row and of each token."""
    if IS_SCALAR:
        return part * (x_scale * w_scale)[None, :]
    else:  # Triton compiles what follows a return, and 3.9 refuses to index a scalar there
        return part * w_scale[:, None] * x_scale[None, :]


@triton.jit
def _products(
    x, x_scales, rows, w, w_scales, expert, first_n,
    N: tl.constexpr, K: tl.constexpr, NUM_PARTS: tl.constexpr, X: tl.constexpr,
    GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, N_OFFSET: tl.constexpr, K_OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """W[first_n.., :] times x[rows, :], float32 [BLOCK_N, BLOCK_M], and of a second part N rows
    below it (NUM_PARTS 2: up after gate), else the same again.

    Of FP8, each block of columns is multiplied apart and its scales applied in float32: the tensor
    cores add up E4M3 products with fewer bits than float32 has. Weights begin N_OFFSET rows and
    K_OFFSET columns inside of a scale block [GROUP_N, GROUP_K].
    """
    n = tl.minimum(first_n + tl.arange(0, BLOCK_N), N - 1)
    columns = tl.arange(0, BLOCK_K)
    x_tile = x + rows.to(tl.int64)[:, None] * K + columns[None, :]
    w_tile = w + (expert.to(tl.int64) * (NUM_PARTS * N) + n)[:, None] * K + columns[None, :]
    IS_SCALAR: tl.constexpr = GROUP_N % BLOCK_N == 0 and N_OFFSET % BLOCK_N == 0
    NUM_K: tl.constexpr = (K_OFFSET + K + GROUP_K - 1) // GROUP_K
    SCALE_ROWS: tl.constexpr = (N_OFFSET + N + GROUP_N - 1) // GROUP_N
    row = tl.minimum(first_n, N - 1) if IS_SCALAR else n
    block_n = (row + N_OFFSET) // GROUP_N
    w_scale = w_scales + (expert * (NUM_PARTS * SCALE_ROWS) + block_n) * NUM_K
    x_scale = x_scales + rows.to(tl.int64) * ((K + GROUP - 1) // GROUP)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if X != PLAIN:  # scales are fetched a step ahead: the sums wait for them
        s = tl.load(w_scale)
        s_up = tl.load(w_scale + (NUM_PARTS - 1) * SCALE_ROWS * NUM_K)
    if X == QUANTISED:
        s_x = tl.load(x_scale)
    for k in range(0, K, BLOCK_K):
        tokens = _load(x_tile + k, k, K, BLOCK_K)
        weights = _load(w_tile + k, k, K, BLOCK_K)
        if X == PLAIN:
            acc = tl.dot(weights, tl.trans(tokens), acc)
            if NUM_PARTS == 2:
                acc_up = tl.dot(_load(w_tile + N * K + k, k, K, BLOCK_K), tl.trans(tokens), acc_up)
        else:
            later = tl.minimum(k + BLOCK_K, K - 1)
            if X == TO_QUANTISE:
                tokens, token_scale = quantise(tokens.to(tl.float32), 1)
            else:
                token_scale = s_x
                s_x = tl.load(x_scale + later // GROUP)
            tokens = tl.trans(tokens)
            now, now_up = s, s_up
            s = tl.load(w_scale + (later + K_OFFSET) // GROUP_K)
            acc += _scaled(tl.dot(weights, tokens), now, token_scale, IS_SCALAR)
            if NUM_PARTS == 2:
                s_up = tl.load(w_scale + SCALE_ROWS * NUM_K + (later + K_OFFSET) // GROUP_K)
                up = tl.dot(_load(w_tile + N * K + k, k, K, BLOCK_K), tokens)
                acc_up += _scaled(up, now_up, token_scale, IS_SCALAR)
    return acc, acc_up


@triton.jit
def _find_block(
    ids, blocks, num_blocks, num_experts, BLOCK_M: tl.constexpr, IS_SORTED: tl.constexpr
):
    """Of this program's block of tokens: its expert (negative for none), its rows, which of them
    are there, and the program's tile of weight rows.

    Neighbouring programs share a tile of weights where an expert has several blocks. Without
    sorting each pair of token and expert is a block of one row.

    .cg: down_kernel reads this before it has waited for anything, and until then an L1 may hold
    what other programs read at these addresses for the layer before.
    """
    pid = tl.program_id(0)
    block, tile = pid % num_blocks, pid // num_blocks
    offsets = tl.arange(0, BLOCK_M)
    if IS_SORTED:
        expert = tl.load(blocks + block, cache_modifier=".cg")
        first = tl.load(blocks + num_blocks + block, cache_modifier=".cg")
        end = tl.load(blocks + 2 * num_blocks + block, cache_modifier=".cg")
        is_row = first + offsets < end
        return expert, tl.where(is_row, first + offsets, first), is_row, tile
    expert = tl.load(ids + block, cache_modifier=".cg").to(tl.int32)
    expert = tl.where(expert < num_experts, expert, -1)
    return expert, block + 0 * offsets, offsets == 0, tile


@triton.jit(do_not_specialize=["num_blocks"])
def gate_up_kernel(
    x, x_scales, w, w_scales, bias, out, out_scales, ids, blocks, order, num_blocks, num_experts,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, X: tl.constexpr,
    LIMIT: tl.constexpr, NUM_PARTS: tl.constexpr,
    QUANTISES: tl.constexpr, IS_SORTED: tl.constexpr,
    GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[row] = silu(gate x) * up x [INNER] of the pair of token and expert in each row; or as
    `activate` says; without a gate (NUM_PARTS 1) max(up x, 0) ** 2. bias: float32 [experts,
    NUM_PARTS INNER] or None.

    QUANTISES: as E4M3 with out_scales [rows, INNER / GROUP]; a tile is a group then.
    """
    begin_dependent(PDL)
    expert, rows, is_row, tile = _find_block(
        ids, blocks, num_blocks, num_experts, BLOCK_M, IS_SORTED
    )
    if expert < 0:
        return
    pairs = tl.load(order + rows) if IS_SORTED else rows
    gate, up = _products(
        x, x_scales, pairs // TOP_K, w, w_scales, expert, tile * BLOCK_N,
        INNER, HIDDEN, NUM_PARTS, X, GROUP_N, GROUP_K, OFFSET, 0, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if bias is not None:
        own = bias + expert.to(tl.int64) * (NUM_PARTS * INNER) + n
        gate += tl.load(own, mask=n < INNER, other=0.0)[:, None]
        if NUM_PARTS == 2:
            up += tl.load(own + INNER, mask=n < INNER, other=0.0)[:, None]
    inner = tl.where(gate < 0.0, 0.0, gate * gate) if NUM_PARTS == 1 else activate(gate, up, LIMIT)
    is_stored = (n < INNER)[:, None] & is_row[None, :]
    target = out + rows.to(tl.int64)[None, :] * INNER + n[:, None]
    if QUANTISES:
        tl.static_assert(BLOCK_N == GROUP)
        q, scales = quantise(tl.where((n < INNER)[:, None], inner, 0.0), 0)
        tl.store(target, q, mask=is_stored)
        NUM_GROUPS: tl.constexpr = (INNER + GROUP - 1) // GROUP
        tl.store(out_scales + rows.to(tl.int64) * NUM_GROUPS + tile, scales, mask=is_row)
    else:
        tl.store(target, inner.to(out.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=["num_blocks"])
def down_kernel(
    x, x_scales, w, w_scales, bias, out, ids, blocks, num_blocks, num_experts,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, X: tl.constexpr,
    IS_SORTED: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[row] = down x[row] [HIDDEN] of the pair of token and expert in each row. bias: float32
    [experts, HIDDEN] or None.

    Follows gate_up_kernel, which waited for the choice of experts: that can be read before the
    kernel has ended. (Weights prefetched to L2 then only slow down those that it still reads.)
    """
    expert, rows, is_row, tile = _find_block(
        ids, blocks, num_blocks, num_experts, BLOCK_M, IS_SORTED
    )
    begin_dependent(PDL)
    if expert < 0:
        return
    acc, _ = _products(
        x, x_scales, rows, w, w_scales, expert, tile * BLOCK_N,
        HIDDEN, INNER, 1, X, GROUP_N, GROUP_K, 0, OFFSET, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if bias is not None:
        own = bias + expert.to(tl.int64) * HIDDEN + n
        acc += tl.load(own, mask=n < HIDDEN, other=0.0)[:, None]
    target = out + rows.to(tl.int64)[None, :] * HIDDEN + n[:, None]
    is_stored = (n < HIDDEN)[:, None] & is_row[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=is_stored)
