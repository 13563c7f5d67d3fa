# mypy: ignore-errors
"""Device code of `moe_router.py`: names in capitals are compile-time constants."""

import triton
import triton.language as tl

from vllm.kernels.triton.moe_kernels import begin_dependent


@triton.jit
def _best_groups(choice, NUM_GROUPS: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr,
                 SUMMED: tl.constexpr):  # fmt: skip
    """`choice` [experts] with -inf outside of the KEPT groups whose SUMMED best are most."""
    grouped = tl.reshape(choice, [NUM_GROUPS, SIZE])
    best = tl.max(grouped, 1)
    if SUMMED == 2:
        is_best = tl.arange(0, SIZE)[None, :] == tl.argmax(grouped, 1)[:, None]
        best += tl.max(tl.where(is_best, float("-inf"), grouped), 1)
    groups = tl.arange(0, NUM_GROUPS)
    is_kept = tl.zeros([NUM_GROUPS], tl.int1)
    for _ in tl.static_range(KEPT):
        taken = groups == tl.argmax(best, 0)
        is_kept = is_kept | taken
        best = tl.where(taken, float("-inf"), best)
    return tl.reshape(tl.where(is_kept[:, None], grouped, float("-inf")), [NUM_GROUPS * SIZE])


# A model has one stride; Triton has to know that 16 divides it, or reads x two bytes at a time.
@triton.jit(do_not_specialize=["num_tokens"])
def split_product_kernel(
    x, gate, parts, num_tokens, x_stride,
    HIDDEN: tl.constexpr, BLOCK_K: tl.constexpr, NUM_ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """parts[:, split] [tokens, rows of the gate, filled up to whole blocks] float32 = x[:, columns
    of the split] @ gate[:, those].T.
    Grid (splits of BLOCK_K columns, blocks of BLOCK_E rows, blocks of ROWS tokens)."""
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    own = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    tokens = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    is_token = (tokens < num_tokens)[:, None]
    # The weight is no kernel's output: it is on its way while the one before this ends.
    is_loaded = (own < NUM_ROWS)[:, None] & (k < HIDDEN)[None, :]
    w = tl.load(gate + own[:, None] * HIDDEN + k[None, :], mask=is_loaded, other=0.0)
    begin_dependent(PDL)
    rows = x + tokens.to(tl.int64)[:, None] * x_stride + k[None, :]
    values = tl.load(rows, mask=is_token & (k < HIDDEN)[None, :], other=0.0)
    part = tokens * tl.num_programs(0) + tl.program_id(0)
    target = parts + part[:, None] * (tl.num_programs(1) * BLOCK_E) + own[None, :]
    tl.store(target, tl.dot(values, tl.trans(w)), mask=is_token)


@triton.jit
def _sum(
    logits, is_there, missing,
    SPLITS: tl.constexpr, SPLIT_STRIDE: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Of SPLITS parts; as ROUNDED has it: the type in which a linear layer would hand it over, or
    None."""
    x = tl.load(logits, mask=is_there, other=missing).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(logits + split * SPLIT_STRIDE, mask=is_there, other=0.0)
    return x if ROUNDED is None else x.to(ROUNDED).to(tl.float32)


@triton.jit
def route_kernel(
    logits, bias, weights, ids, others, row_stride, factor,
    NUM_EXPERTS: tl.constexpr, E_PAD: tl.constexpr, NUM_OTHERS: tl.constexpr,
    OTHERS_STRIDE: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr,
    SPLITS: tl.constexpr, SPLIT_STRIDE: tl.constexpr, ROUNDED: tl.constexpr,
    IS_SIGMOID: tl.constexpr, RENORMALISES: tl.constexpr, HAS_BIAS: tl.constexpr,
    NUM_GROUPS: tl.constexpr, KEPT_GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program for each token. Logits are sums of SPLITS parts (`_sum`): of experts, then others,
    which it hands on."""
    begin_dependent(PDL)
    token = tl.program_id(0).to(tl.int64)
    experts, places = tl.arange(0, E_PAD), tl.arange(0, K_PAD)
    is_expert = experts < NUM_EXPERTS
    start = logits + token * row_stride + experts
    x = _sum(start, is_expert, float("-inf"), SPLITS, SPLIT_STRIDE, ROUNDED)
    for other in tl.static_range(NUM_OTHERS):
        place = logits + token * row_stride + (NUM_EXPERTS + other)
        y = _sum(place, True, 0.0, SPLITS, SPLIT_STRIDE, ROUNDED)
        tl.store(others + token * OTHERS_STRIDE + other, y.to(others.dtype.element_ty))
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
    else:
        shifted = tl.exp(x - tl.max(x, 0))
        scores = shifted / tl.sum(shifted, 0)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias + experts, mask=is_expert, other=0.0)
    choice = tl.where(is_expert, choice, float("-inf"))
    if NUM_GROUPS > 1:
        choice = _best_groups(choice, NUM_GROUPS, NUM_EXPERTS // NUM_GROUPS, KEPT_GROUPS,
                              2 if HAS_BIAS else 1)  # fmt: skip
    chosen = tl.zeros([K_PAD], tl.int32)
    shares = tl.zeros([K_PAD], tl.float32)
    for place in tl.static_range(TOP_K):
        # Where all scores are NaN, any expert inside will do: its weight is NaN.
        best = tl.minimum(tl.argmax(choice, 0), NUM_EXPERTS - 1)
        share = tl.sum(tl.where(experts == best, scores, 0.0), 0)
        chosen = tl.where(places == place, best, chosen)
        shares = tl.where(places == place, share, shares)
        choice = tl.where(experts == best, float("-inf"), choice)
    if RENORMALISES:
        shares = shares / tl.sum(shares, 0)
    target, is_stored = token * TOP_K + places, places < TOP_K
    tl.store(weights + target, shares * factor, mask=is_stored)
    tl.store(ids + target, chosen.to(tl.int64), mask=is_stored)
