# mypy: ignore-errors
"""Device code of `moe_router.py`: names in capitals are compile-time constants."""

import triton
import triton.language as tl

from vllm.kernels.triton.moe_kernels import begin_dependent


@triton.jit
def _best_groups(choice, ROWS: tl.constexpr, NUM_GROUPS: tl.constexpr, SIZE: tl.constexpr,
                 KEPT: tl.constexpr, SUMMED: tl.constexpr):  # fmt: skip
    """`choice` [ROWS, experts] with -inf outside of the KEPT groups whose SUMMED best are most."""
    grouped = tl.reshape(choice, [ROWS, NUM_GROUPS, SIZE])
    best = tl.max(grouped, 2)
    if SUMMED == 2:
        place = tl.argmax(grouped, 2)
        is_best = tl.arange(0, SIZE)[None, None, :] == place[:, :, None]
        best += tl.max(tl.where(is_best, float("-inf"), grouped), 2)
    groups = tl.arange(0, NUM_GROUPS)[None, :]
    is_kept = tl.zeros([ROWS, NUM_GROUPS], tl.int1)
    for _ in tl.static_range(KEPT):
        taken = groups == tl.argmax(best, 1)[:, None]
        is_kept = is_kept | taken
        best = tl.where(taken, float("-inf"), best)
    kept = tl.where(is_kept[:, :, None], grouped, float("-inf"))
    return tl.reshape(kept, [ROWS, NUM_GROUPS * SIZE])


@triton.jit
def _choose(
    x, tokens, num_tokens, bias, weights, ids, factor,
    NUM_EXPERTS: tl.constexpr, E_PAD: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr,
    IS_SIGMOID: tl.constexpr, RENORMALISES: tl.constexpr, HAS_BIAS: tl.constexpr,
    NUM_GROUPS: tl.constexpr, KEPT_GROUPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes weights and ids of `tokens` [ROWS] by their logits x [ROWS, E_PAD], -inf past the
    experts."""
    experts, places = tl.arange(0, E_PAD)[None, :], tl.arange(0, K_PAD)[None, :]
    is_token, is_expert = (tokens < num_tokens)[:, None], experts < NUM_EXPERTS
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
    else:
        shifted = tl.exp(x - tl.max(tl.where(is_token, x, 0.0), 1)[:, None])
        scores = shifted / tl.sum(shifted, 1)[:, None]
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias + experts, mask=is_expert, other=0.0)
    choice = tl.where(is_expert, choice, float("-inf"))
    if NUM_GROUPS > 1:
        choice = _best_groups(choice, ROWS, NUM_GROUPS, NUM_EXPERTS // NUM_GROUPS, KEPT_GROUPS,
                              2 if HAS_BIAS else 1)  # fmt: skip
    chosen = tl.zeros([ROWS, K_PAD], tl.int32)
    shares = tl.zeros([ROWS, K_PAD], tl.float32)
    for place in tl.static_range(TOP_K):
        # Where all scores are NaN, any expert inside will do: its weight is NaN.
        best = tl.minimum(tl.argmax(choice, 1), NUM_EXPERTS - 1)[:, None]
        share = tl.sum(tl.where(experts == best, scores, 0.0), 1)[:, None]
        chosen = tl.where(places == place, best, chosen)
        shares = tl.where(places == place, share, shares)
        choice = tl.where(experts == best, float("-inf"), choice)
    if RENORMALISES:
        shares = shares / tl.sum(shares, 1)[:, None]
    target = tokens.to(tl.int64)[:, None] * TOP_K + places
    is_stored = is_token & (places < TOP_K)
    tl.store(weights + target, shares * factor, mask=is_stored)
    tl.store(ids + target, chosen.to(tl.int64), mask=is_stored)


@triton.jit(do_not_specialize=["num_tokens"])
def route_kernel(
    logits, bias, weights, ids, num_tokens, row_stride, factor,
    NUM_EXPERTS: tl.constexpr, E_PAD: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr,
    IS_SIGMOID: tl.constexpr, RENORMALISES: tl.constexpr, HAS_BIAS: tl.constexpr,
    NUM_GROUPS: tl.constexpr, KEPT_GROUPS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin_dependent(PDL)
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    experts = tl.arange(0, E_PAD)[None, :]
    is_there = (tokens < num_tokens)[:, None] & (experts < NUM_EXPERTS)
    pointers = logits + tokens.to(tl.int64)[:, None] * row_stride + experts
    x = tl.load(pointers, mask=is_there, other=float("-inf")).to(tl.float32)
    _choose(
        x, tokens, num_tokens, bias, weights, ids, factor, NUM_EXPERTS, E_PAD, TOP_K, K_PAD,
        IS_SIGMOID, RENORMALISES, HAS_BIAS, NUM_GROUPS, KEPT_GROUPS, ROWS,
    )  # fmt: skip


# A model has one stride; Triton has to know that 16 divides it, or reads x two bytes at a time.
@triton.jit(do_not_specialize=["num_tokens"])
def gate_kernel(
    x, gate, bias, partial, num_arrived, weights, ids, num_tokens, x_stride, factor,
    HIDDEN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, E_PAD: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr,
    IS_SIGMOID: tl.constexpr, RENORMALISES: tl.constexpr, HAS_BIAS: tl.constexpr,
    NUM_GROUPS: tl.constexpr, KEPT_GROUPS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The logits x @ gate.T, and the choice by them. Grid (splits of BLOCK_K columns, blocks of
    experts, blocks of ROWS tokens).

    A program multiplies once and leaves its part of the sums in `partial` [splits, tokens, E_PAD].
    Of those of a block of tokens the last to arrive adds them up, in the order of the splits, and
    chooses; it leaves `num_arrived` zero, as it found it. Logits are rounded to the type of x, as
    those are that a linear layer hands to `route_kernel`: a token's choice must not depend on how
    many come with it.
    """
    NUM_SPLITS: tl.constexpr = (HIDDEN + BLOCK_K - 1) // BLOCK_K
    NUM_PROGRAMS: tl.constexpr = NUM_SPLITS * ((NUM_EXPERTS + BLOCK_E - 1) // BLOCK_E)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    own = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    tokens = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    is_token = (tokens < num_tokens)[:, None]
    # The weight is no kernel's output: it is on its way while the one before this ends.
    is_loaded = (own < NUM_EXPERTS)[:, None] & (k < HIDDEN)[None, :]
    w = tl.load(gate + own[:, None] * HIDDEN + k[None, :], mask=is_loaded, other=0.0)
    begin_dependent(PDL)
    rows = x + tokens.to(tl.int64)[:, None] * x_stride + k[None, :]
    values = tl.load(rows, mask=is_token & (k < HIDDEN)[None, :], other=0.0)
    start = partial + tokens[:, None] * E_PAD
    target = start + tl.program_id(0) * num_tokens * E_PAD + own[None, :]
    tl.store(target, tl.dot(values, tl.trans(w)), mask=is_token)
    tl.debug_barrier()  # one thread counts for all: after all have stored
    counter = num_arrived + tl.program_id(2)
    if tl.atomic_add(counter, 1, sem="acq_rel") == NUM_PROGRAMS - 1:
        tl.store(counter, 0)
        experts = tl.arange(0, E_PAD)[None, :]
        is_expert = experts < NUM_EXPERTS
        logits = tl.zeros([ROWS, E_PAD], tl.float32)
        for split in tl.static_range(NUM_SPLITS):
            # .cg: what other SMs have written is in L2, not in the L1 of this one.
            part = start + split * num_tokens * E_PAD + experts
            logits += tl.load(part, mask=is_token & is_expert, other=0.0, cache_modifier=".cg")
        logits = logits.to(x.dtype.element_ty).to(tl.float32)
        _choose(
            tl.where(is_expert, logits, float("-inf")), tokens, num_tokens, bias, weights, ids,
            factor, NUM_EXPERTS, E_PAD, TOP_K, K_PAD, IS_SIGMOID, RENORMALISES, HAS_BIAS,
            NUM_GROUPS, KEPT_GROUPS, ROWS,
        )  # fmt: skip
