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
    HIDDEN: tl.constexpr, BLOCK_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """parts[:, split] [tokens, experts] float32 = x[:, columns of the split] @ gate[:, those].T.
    Grid (splits of BLOCK_K columns, blocks of experts, blocks of ROWS tokens)."""
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    own = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    tokens = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    is_token, is_expert = (tokens < num_tokens)[:, None], own < NUM_EXPERTS
    # The weight is no kernel's output: it is on its way while the one before this ends.
    is_loaded = is_expert[:, None] & (k < HIDDEN)[None, :]
    w = tl.load(gate + own[:, None] * HIDDEN + k[None, :], mask=is_loaded, other=0.0)
    begin_dependent(PDL)
    rows = x + tokens.to(tl.int64)[:, None] * x_stride + k[None, :]
    values = tl.load(rows, mask=is_token & (k < HIDDEN)[None, :], other=0.0)
    part = tokens * tl.num_programs(0) + tl.program_id(0)
    target = parts + part[:, None] * NUM_EXPERTS + own[None, :]
    tl.store(target, tl.dot(values, tl.trans(w)), mask=is_token & is_expert[None, :])


@triton.jit
def route_kernel(
    logits, bias, weights, ids, row_stride, factor,
    NUM_EXPERTS: tl.constexpr, E_PAD: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr,
    SPLITS: tl.constexpr, ROUNDED: tl.constexpr,
    IS_SIGMOID: tl.constexpr, RENORMALISES: tl.constexpr, HAS_BIAS: tl.constexpr,
    NUM_GROUPS: tl.constexpr, KEPT_GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program for each token. Logits are the sum of SPLITS parts, which lie one after another,
    as ROUNDED has them: the type in which a linear layer would hand them over, or None."""
    begin_dependent(PDL)
    token = tl.program_id(0).to(tl.int64)
    experts, places = tl.arange(0, E_PAD), tl.arange(0, K_PAD)
    is_expert = experts < NUM_EXPERTS
    start = logits + token * row_stride + experts
    x = tl.load(start, mask=is_expert, other=float("-inf")).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(start + split * NUM_EXPERTS, mask=is_expert, other=0.0)
    if ROUNDED is not None:
        x = x.to(ROUNDED).to(tl.float32)
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
