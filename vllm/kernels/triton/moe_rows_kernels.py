# mypy: ignore-errors
"""Device code of `moe_rows.py`: sorting tokens by their experts, and bringing them back.

A pair is a token with one of its experts, numbered token * TOP_K + place.
"""

import triton
import triton.language as tl

from vllm.kernels.triton.moe_kernels import FP8_MAX, GROUP, MIN_AMAX, begin_dependent, silu_mul

# Forms of the scales of rows.
FLOAT32: tl.constexpr = tl.constexpr(0)
FLOAT32_CEIL_UE8M0: tl.constexpr = tl.constexpr(1)  # powers of two, rounded up
UE8M0: tl.constexpr = tl.constexpr(2)  # their exponents, four in an int32

# ---------------------------------------------------------------- sorting by expert


@triton.jit
def _bins_of(ids, pairs, num_pairs, num_experts):
    """1 + the expert of each pair; 0 for pairs of no expert here and those past the last."""
    found = tl.load(ids + pairs, mask=pairs < num_pairs, other=-1)
    return tl.where((found >= 0) & (found < num_experts), found + 1, 0).to(tl.int32)


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(ids, counts, num_pairs, num_experts, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """counts[chunk, bin] of the pairs of each chunk."""
    chunk = tl.program_id(0)
    found = _bins_of(ids, chunk * CHUNK + tl.arange(0, CHUNK), num_pairs, num_experts)
    tl.store(counts + chunk * BINS + tl.arange(0, BINS), tl.histogram(found, BINS))


@triton.jit
def _write_blocks(
    blocks, totals, starts, num_blocks, chunk, num_chunks,
    BINS: tl.constexpr, BLOCK_M: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """Blocks of BLOCK_M rows of one expert each: expert, first row, end of the expert's rows. The
    programs of all chunks share the work."""
    bins = tl.arange(0, BINS)
    used = tl.cdiv(totals, BLOCK_M)
    first = tl.cumsum(used, 0) - used
    for i in range(chunk, tl.max(used, 0), num_chunks):
        target, is_used = blocks + first + i, i < used
        tl.store(target, bins - 1, mask=is_used)
        tl.store(target + num_blocks, starts + i * BLOCK_M, mask=is_used)
        tl.store(target + 2 * num_blocks, starts + totals, mask=is_used)
    num_used = tl.sum(used, 0)
    for begin in range(chunk * FILL, num_blocks, num_chunks * FILL):
        block = begin + tl.arange(0, FILL)
        tl.store(blocks + block, -1, mask=(block >= num_used) & (block < num_blocks))


@triton.jit
def label_kernel(blocks, expert_of_row, num_blocks, BLOCK_M: tl.constexpr):
    """Rows of block b are b * BLOCK_M and on: the expert of each, -1 where no pair is."""
    block, offsets = tl.program_id(0), tl.arange(0, BLOCK_M)
    expert, row = tl.load(blocks + block), block * BLOCK_M + offsets
    end = tl.load(blocks + 2 * num_blocks + block, mask=expert >= 0, other=0)
    tl.store(expert_of_row + row, tl.where(row < end, expert, -1))


@triton.jit(do_not_specialize=["num_pairs", "num_blocks", "stride", "num_chunks"])
def sort_kernel(
    ids, counts, cursors, order, positions, ends, blocks,
    num_pairs, num_experts, num_blocks, stride, num_chunks,
    BINS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS_PAD: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, FILL: tl.constexpr, IS_MASKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gives every pair a row, those of an expert one after another: order[row] = pair,
    positions[pair] = row, -1 for pairs of no expert here.

    Experts begin at multiples of ALIGN rows; IS_MASKED: at expert * stride. ends[i]: row after the
    last of the first i experts (ALIGN 1), or, masked, number of rows of expert i - 1. The order
    within an expert is any, and no result depends on it.
    """
    begin_dependent(PDL)
    chunk = tl.program_id(0)
    bins = tl.arange(0, BINS)
    pairs = chunk * CHUNK + tl.arange(0, CHUNK)
    found = _bins_of(ids, pairs, num_pairs, num_experts)
    if CHUNKS_PAD == 1:
        totals = tl.histogram(found, BINS)
        before = tl.zeros([BINS], tl.int32)
    else:
        chunks = tl.arange(0, CHUNKS_PAD)[:, None]
        every = tl.load(counts + chunks * BINS + bins[None, :], mask=chunks < num_chunks, other=0)
        totals = tl.sum(every, 0)
        before = tl.sum(tl.where(chunks < chunk, every, 0), 0)
    totals = tl.where(bins == 0, 0, totals)
    if IS_MASKED:
        starts = tl.maximum(bins - 1, 0) * stride
    else:
        padded = tl.cdiv(totals, ALIGN) * ALIGN
        starts = tl.cumsum(padded, 0) - padded
    if chunk == 0:
        told = totals if IS_MASKED else starts + totals
        tl.store(ends + bins, told, mask=bins <= num_experts)
    if BLOCK_M > 0:
        _write_blocks(blocks, totals, starts, num_blocks, chunk, num_chunks, BINS, BLOCK_M, FILL)
    own = cursors + chunk * BINS
    tl.store(own + bins, starts + before)
    tl.debug_barrier()  # the atomics below add to what was just stored
    is_here = found > 0
    row = tl.atomic_add(own + found, 1, mask=is_here)
    tl.store(order + row, pairs, mask=is_here)
    tl.store(positions + pairs, tl.where(is_here, row, -1), mask=pairs < num_pairs)


# ---------------------------------------------------------------- rows in and out


@triton.jit
def _load_groups(x, K: tl.constexpr, G_PAD: tl.constexpr):
    """K columns from x on as float32 [G_PAD, GROUP], zeros past K."""
    columns = tl.arange(0, G_PAD)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return tl.load(x + columns, mask=columns < K, other=0.0).to(tl.float32)


@triton.jit
def _quantise(x, FORM: tl.constexpr):
    """E4M3 values of [groups, GROUP], a float32 scale for each group, and its biased exponent where
    it is a power of two. Divisions are rounded as IEEE asks: a plain `/` is an ulp or two off."""
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 1), MIN_AMAX), FP8_MAX)
    bits = scale.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    if FORM != FLOAT32:
        scale = (exponent << 23).to(tl.float32, bitcast=True)
    return tl.div_rn(x, scale[:, None]).to(tl.float8e4nv), scale, exponent


@triton.jit
def _write_row(
    values, scale, exponent, q, scales, row, block_rows, row_stride, group_stride,
    K: tl.constexpr, G_PAD: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """values [G_PAD, GROUP] in E4M3 to row `row`, where that is not negative.

    Scales lie in blocks of block_rows rows, one block after another: at row * row_stride + group *
    group_stride, or for UE8M0 byte group % 4 of the int32 at row + group // 4 * group_stride.
    """
    groups = tl.arange(0, G_PAD)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    NUM_GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    NUM_WORDS: tl.constexpr = (NUM_GROUPS + 3) // 4
    wide = row.to(tl.int64)
    tl.store(q + wide * K + columns, values, mask=(row >= 0) & (columns < K))
    block, place = wide // block_rows, wide % block_rows
    if FORM == UE8M0:  # bytes past the groups are zero, not what memory held
        start = scales + (block * (NUM_WORDS * group_stride) + place) * 4
        written = tl.where(groups < NUM_GROUPS, exponent, 0).to(tl.uint8)
        target = start + groups // 4 * (group_stride * 4) + groups % 4
        tl.store(target, written, mask=(row >= 0) & (groups < NUM_WORDS * 4))
    else:
        start = scales + block * (NUM_GROUPS * group_stride) + place * row_stride
        tl.store(start + groups * group_stride, scale, mask=(row >= 0) & (groups < NUM_GROUPS))


@triton.jit(do_not_specialize=["block_rows", "row_stride", "group_stride"])
def spread_kernel(
    x, q, scales, positions, x_stride, block_rows, row_stride, group_stride,
    K: tl.constexpr, G_PAD: tl.constexpr, FORM: tl.constexpr, TOP_K: tl.constexpr,
):  # fmt: skip
    """Quantises a token [K], once, and writes it to the row of each of its pairs; to its own where
    there are no positions."""
    token = tl.program_id(0)
    x_row = _load_groups(x + token.to(tl.int64) * x_stride, K, G_PAD)
    values, scale, exponent = _quantise(x_row, FORM)
    for place in range(TOP_K):
        row = token if positions is None else tl.load(positions + token * TOP_K + place)
        _write_row(values, scale, exponent, q, scales, row, block_rows, row_stride, group_stride,
                   K, G_PAD, FORM)  # fmt: skip


@triton.jit(do_not_specialize=["block_rows", "row_stride", "group_stride"])
def activate_kernel(
    x, q, scales, positions, block_rows, row_stride, group_stride,
    K: tl.constexpr, G_PAD: tl.constexpr, FORM: tl.constexpr, IS_UP_FIRST: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of a pair's row [2 K], quantised."""
    row = tl.load(positions + tl.program_id(0))
    if row < 0:
        return
    start = x + row.to(tl.int64) * (2 * K)
    gate, up = start + IS_UP_FIRST * K, start + (1 - IS_UP_FIRST) * K
    inner = silu_mul(_load_groups(gate, K, G_PAD), _load_groups(up, K, G_PAD))
    values, scale, exponent = _quantise(inner, FORM)
    _write_row(values, scale, exponent, q, scales, row, block_rows, row_stride, group_stride,
               K, G_PAD, FORM)  # fmt: skip


@triton.jit
def _sum_of_pairs(
    rows, weights, positions, num_experts, token, columns,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, IS_SORTED: tl.constexpr,
):  # fmt: skip
    """Sum over the pairs of a token, in their order, of weight * row, in float32; of some columns.

    positions: row of each pair, or the ids of experts where rows are not sorted; pairs of no
    expert here add nothing.
    """
    is_column = columns < HIDDEN
    acc = tl.zeros(columns.shape, tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        row = tl.load(positions + pair)
        is_here = row >= 0
        if not IS_SORTED:
            is_here = is_here & (row < num_experts)
            row = pair
        pointers = rows + row.to(tl.int64) * HIDDEN + columns
        values = tl.load(pointers, mask=is_column & is_here, other=0.0).to(tl.float32)
        acc += tl.where(is_here, tl.load(weights + pair), 0.0) * values
    return acc


@triton.jit
def combine_kernel(
    rows, weights, positions, out, num_experts,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, IS_SORTED: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[token] = the sum over its pairs. Grid (tokens, parts)."""
    begin_dependent(PDL)
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = _sum_of_pairs(
        rows, weights, positions, num_experts, token, columns, HIDDEN, TOP_K, IS_SORTED
    )
    target = out + token.to(tl.int64) * HIDDEN + columns
    tl.store(target, acc.to(out.dtype.element_ty), mask=columns < HIDDEN)


@triton.jit(do_not_specialize=["num_tokens", "block_rows", "row_stride", "group_stride"])
def combine_norm_kernel(
    rows, weights, positions, addend, residual, norm_weight, normed, q, scales,
    num_tokens, num_experts, eps, block_rows, row_stride, group_stride,
    K: tl.constexpr, G_PAD: tl.constexpr, FORM: tl.constexpr, TOP_K: tl.constexpr,
    IS_SORTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual += the sum over the pairs of a token, and then its RMSNorm, quantised. A program for
    each row of scales, of which those past the tokens become zeros.

    addend: None, or what is added to the sum. normed: None, or receives what is quantised. Values
    are rounded where they would be if each of these steps was a kernel.
    """
    begin_dependent(PDL)
    token = tl.program_id(0)
    groups = tl.arange(0, G_PAD)
    NUM_GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    if token >= num_tokens:
        filling = scales + token * row_stride + groups * group_stride
        tl.store(filling, tl.zeros([G_PAD], tl.float32), mask=groups < NUM_GROUPS)
        return
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    is_column = columns < K
    own = token.to(tl.int64) * K + columns
    dtype = residual.dtype.element_ty
    before = tl.load(residual + own, mask=is_column, other=0.0).to(tl.float32)
    factor = tl.load(norm_weight + columns, mask=is_column, other=0.0)
    x = _sum_of_pairs(rows, weights, positions, num_experts, token, columns, K, TOP_K, IS_SORTED)
    x = x.to(dtype).to(tl.float32)
    if addend is not None:
        x += tl.load(addend + own, mask=is_column, other=0.0).to(tl.float32)
        x = x.to(dtype).to(tl.float32)
    x = (x + before).to(dtype)
    tl.store(residual + own, x, mask=is_column)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / K + eps)
    y = (x * scale * factor).to(dtype)
    if normed is not None:
        tl.store(normed + own, y, mask=is_column)
    values, scale, exponent = _quantise(y.to(tl.float32), FORM)
    _write_row(values, scale, exponent, q, scales, token, block_rows, row_stride, group_stride,
               K, G_PAD, FORM)  # fmt: skip
