# mypy: ignore-errors
"""Device code of the FP8 block product in `linear.py`: names in capitals are compile-time
constants."""

import triton
import triton.language as tl

GROUP: tl.constexpr = tl.constexpr(128)  # columns of a token that share a scale
TILES_IN_STEP: tl.constexpr = tl.constexpr(8)  # of tokens, that go through the weight together


# Tokens come in any number, and no number of them shall be compiled for.
@triton.jit(do_not_specialize=["num_tokens"])
def block_gemm(
    x, x_scales, w, w_scales, bias, y, num_tokens, N, K,
    GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, HAS_BIAS: tl.constexpr, IS_WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of y [M, N] = (x * x_scales) @ (w * w_scales).T.

    w: E4M3 [N, K], a scale for each block [GROUP_N, GROUP_K]; x: E4M3 [M, K], a scale for each
    token and 128 columns; BLOCK_K divides 128 and GROUP_K, and IS_WHOLE says that it divides K.
    Each step is multiplied apart and its scales applied in float32: the tensor cores add up E4M3
    products with fewer bits than float32 has. Rows past the last are read as the last.
    """
    num_m, num_n = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    m_tile, n_tile = tl.swizzle2d(tile // num_n, tile % num_n, num_m, num_n, TILES_IN_STEP)
    m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_rows = tl.minimum(m, num_tokens - 1).to(tl.int64)
    w_rows = tl.minimum(n, N - 1).to(tl.int64)
    x_tile = x + x_rows[:, None] * K + k[None, :]
    w_tile = w + w_rows[:, None] * K + k[None, :]
    x_scale = x_scales + x_rows * tl.cdiv(K, GROUP)
    IS_SCALAR: tl.constexpr = GROUP_N % BLOCK_N == 0
    first = n_tile * BLOCK_N if IS_SCALAR else w_rows
    w_scale = w_scales + (first // GROUP_N) * tl.cdiv(K, GROUP_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    s_x, s_w = tl.load(x_scale), tl.load(w_scale)
    for start in range(0, K, BLOCK_K):
        if IS_WHOLE:
            tokens, weights = tl.load(x_tile + start), tl.load(w_tile + start)
        else:
            is_in = (start + k < K)[None, :]
            tokens = tl.load(x_tile + start, mask=is_in, other=0.0)
            weights = tl.load(w_tile + start, mask=is_in, other=0.0)
        part = tl.dot(tokens, tl.trans(weights))
        if IS_SCALAR:
            acc += part * (s_x * s_w)[:, None]
        else:
            acc += part * s_x[:, None] * s_w[None, :]
        # Of the next step, ahead of its product.
        later = tl.minimum(start + BLOCK_K, K - 1)
        s_x, s_w = tl.load(x_scale + later // GROUP), tl.load(w_scale + later // GROUP_K)
    if HAS_BIAS:
        acc += tl.load(bias + w_rows)[None, :]
    is_there = (m < num_tokens)[:, None] & (n < N)[None, :]
    tl.store(y + x_rows[:, None] * N + n[None, :], acc.to(y.dtype.element_ty), mask=is_there)
