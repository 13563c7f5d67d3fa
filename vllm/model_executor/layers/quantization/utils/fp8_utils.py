"""FP8 (E4M3) arithmetic in torch, on any device: what native kernels must equal bit for bit.

A value is q * scale with q in E4M3 (largest 448). Every scale is max|x| / 448 of the values that
share it, by IEEE division; where UE8M0 is asked for, the next power of two at or above that.
Rounding to E4M3 is to nearest, ties to even, of x / scale clamped to +-448. NaN stays NaN.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.kernels.interface import LinearTensors
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, get_fp8_min_max
from vllm.utils.math_utils import cdiv

FP8 = torch.float8_e4m3fn
FP8_MAX = get_fp8_min_max()[1]
# Below it no scale shrinks further: a token of zeros must not divide by zero.
MIN_AMAX = 1e-10
_MANTISSA = 0x7FFFFF  # of a float32
_EXPONENT = 0x7F800000
_ROWS_AT_A_TIME = 2048


# ---------------------------------------------------------------- scales


def ceil_to_power_of_two(x: Tensor) -> Tensor:
    """The smallest normal power of two >= x, for float32 x >= 0; 0, infinity and NaN stay.

    Exact: a carry out of the mantissa, where exp2(ceil(log2(x))) may miss by a factor of two.
    """
    bits = x.contiguous().view(torch.int32)
    rounded = ((bits + _MANTISSA) & _EXPONENT).view(torch.float32)
    return torch.where(torch.isnan(x), x, rounded)


def is_power_of_two(x: Tensor) -> Tensor:
    """Whether each element of float32 x is a normal power of two, as a UE8M0 byte can hold."""
    bits = x.contiguous().view(torch.int32)
    return ((bits & _MANTISSA) == 0) & (bits > 0) & (bits < _EXPONENT)


def fp8_scales(amax: Tensor, use_ue8m0: bool = False, fp8_max: float = FP8_MAX) -> Tensor:
    """float32 scales of values whose greatest magnitude is `amax`."""
    # By a tensor: torch divides by a Python number on CUDA as a product with its reciprocal, which
    # rounds differently.
    scales = amax / torch.full((), fp8_max, device=amax.device)
    return ceil_to_power_of_two(scales) if use_ue8m0 else scales


def round_to_fp8(x: Tensor, scales: Tensor, dtype: torch.dtype = FP8) -> Tensor:
    """x / scales (broadcast), clamped to the finite range and rounded to nearest even."""
    info = torch.finfo(dtype)
    return (x.float() / scales).clamp_(info.min, info.max).to(dtype)


# ---------------------------------------------------------------- weights


def per_block_cast_to_fp8(
    x: Tensor, block_size: Sequence[int] = (128, 128), use_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantises x [N, K] by blocks; edge blocks may be partial.

    Returns q float8_e4m3fn [N, K] and scales float32 [ceil(N / rows), ceil(K / columns)], with
    x ~ q * scale and scale = max|block| / 448 (1 for a block of zeros). use_ue8m0 rounds scales
    up to powers of two, as a UE8M0 exponent byte holds them. Non-finite values are a ValueError.
    """
    num_rows, num_columns = x.shape
    block_rows, block_columns = block_size
    grid = (cdiv(num_rows, block_rows), cdiv(num_columns, block_columns))
    padded = torch.zeros(
        grid[0] * block_rows, grid[1] * block_columns, dtype=torch.float32, device=x.device
    )
    padded[:num_rows, :num_columns] = x
    blocks = padded.view(grid[0], block_rows, grid[1], block_columns)
    amax = blocks.abs().amax(dim=(1, 3))
    if not bool(torch.isfinite(amax).all()):
        raise ValueError("a weight that holds NaN or infinity cannot be quantised")
    scales = fp8_scales(amax, use_ue8m0)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    quantised = round_to_fp8(blocks, scales[:, None, :, None])
    return quantised.view_as(padded)[:num_rows, :num_columns].contiguous(), scales


def dequantise_blocks(
    weight: Tensor,
    scales: Tensor,
    block_size: Sequence[int] = (128, 128),
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """q * scale in `dtype` for weight [..., N, K] and scales [..., N blocks, K blocks].

    float64 holds every product exactly; float32 only where the scales are powers of two.
    """
    _check_grid(weight, scales, block_size)
    size = block_size[1]
    row_scales = scales.to(dtype).repeat_interleave(block_size[0], -2)[..., : weight.shape[-2], :]
    wide = weight.to(dtype, copy=True)
    num_whole = weight.shape[-1] // size
    whole = wide[..., : num_whole * size].unflatten(-1, (num_whole, size))
    whole *= row_scales[..., :num_whole].unsqueeze(-1)
    wide[..., num_whole * size :] *= row_scales[..., num_whole:]
    return wide


def _check_grid(weight: Tensor, scales: Tensor, block_size: Sequence[int]) -> None:
    grid = tuple(cdiv(size, block) for size, block in zip(weight.shape[-2:], block_size))
    if tuple(scales.shape) != (*weight.shape[:-2], *grid):
        raise ValueError(
            f"a tensor of {tuple(weight.shape)} in blocks of {block_size[0]}x{block_size[1]} has "
            f"scales of {(*weight.shape[:-2], *grid)}, not {tuple(scales.shape)}; merged weights "
            f"have scale rows per shard: requantised_ue8m0 takes those"
        )


# ---------------------------------------------------------------- to UE8M0 scales


@dataclass(frozen=True, slots=True)
class RequantError:
    """What re-quantising a weight does to it: relative Frobenius error and greatest error."""

    relative: float
    max_abs: float
    is_exact: bool


def requant_weight_ue8m0_inplace(
    weight: Tensor, weight_scale: Tensor, block_size: Sequence[int] = (128, 128)
) -> None:
    """Re-quantises FP8 weight [..., N, K] in place so that every block's scale is a power of two.

    weight_scale: float32 [..., ceil(N / rows), ceil(K / columns)]. The weight is rounded to E4M3 a
    second time, which cannot be undone; where all scales are powers of two already, nothing is
    written.
    """
    _check_grid(weight, weight_scale, block_size)
    _requantise(weight, weight_scale, (weight.shape[-2],), block_size)


def requantised_ue8m0(tensors: LinearTensors) -> LinearTensors:
    """The same layer, or [E, N, K] experts, with power-of-two scales, in tensors of its own.

    Each merged shard keeps its own scale rows. Where all scales are powers of two already, the
    weight needs nothing: `tensors` itself is returned.
    """
    assert tensors.scales is not None and tensors.format.scale == "block" and not tensors.is_cut
    if bool(is_power_of_two(tensors.scales).all()):
        return tensors
    weight, scales = tensors.weight.clone(), tensors.scales.clone()
    _requantise(weight, scales, tensors.shard_rows, tensors.format.block)
    return LinearTensors(
        tensors.format, weight, tensors.shard_rows, scales, tensors.bias, tensors.input_scale
    )


def requant_error(tensors: LinearTensors) -> RequantError:
    """The error that `requantised_ue8m0` causes, against the weight as stored (q * scale, float32).

    Where all scales are powers of two that is none, and the weight is not read.
    """
    assert tensors.scales is not None and tensors.format.scale == "block"
    if tensors.is_cut:  # zeros around it change no block's largest value, nor any sum
        from vllm.ops.block_fit import padded_tensors

        tensors, _ = padded_tensors(tensors)
        assert tensors.scales is not None
    block = tensors.format.block
    represented = is_power_of_two(tensors.scales) | (tensors.scales == 0)
    if bool(represented.all()):
        return RequantError(0.0, 0.0, is_exact=True)
    error, norm, worst = 0.0, 0.0, 0.0
    for q, scales in _pieces(tensors.weight, tensors.scales, tensors.shard_rows, block[0]):
        stored = dequantise_blocks(q, scales, block)
        recast = per_block_cast_to_fp8(stored, block, use_ue8m0=True)
        norm += _sum_of_squares(stored)
        difference = stored.sub_(dequantise_blocks(*recast, block))
        error += _sum_of_squares(difference)
        worst = max(worst, float(difference.abs().max()))
    return RequantError((error / norm) ** 0.5 if norm else 0.0, worst, is_exact=worst == 0)


def _sum_of_squares(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _requantise(
    weight: Tensor, scales: Tensor, shard_rows: Sequence[int], block_size: Sequence[int]
) -> None:
    if bool(is_power_of_two(scales).all()):
        return
    for q, own_scales in _pieces(weight, scales, shard_rows, block_size[0]):
        wide = dequantise_blocks(q, own_scales, block_size)
        new_q, new_scales = per_block_cast_to_fp8(wide, block_size, use_ue8m0=True)
        q.copy_(new_q)
        own_scales.copy_(new_scales)


def _pieces(
    weight: Tensor, scales: Tensor, shard_rows: Sequence[int], block_rows: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of whole blocks of one shard of one expert, with their scales; few rows at a time,
    so that the float32 copies made of them stay small beside the weight."""
    if weight.ndim > 2:
        for expert in zip(weight, scales):
            yield from _pieces(*expert, shard_rows, block_rows)
        return
    step = max(1, _ROWS_AT_A_TIME // block_rows)
    row = scale_row = 0
    for num_rows in shard_rows:
        num_scales = cdiv(num_rows, block_rows)
        for first in range(0, num_scales, step):
            last = min(first + step, num_scales)
            rows = slice(row + first * block_rows, row + min(last * block_rows, num_rows))
            yield weight[rows], scales[scale_row + first : scale_row + last]
        row, scale_row = row + num_rows, scale_row + num_scales


def deepgemm_post_process_fp8_weight_block(
    wq: Tensor, ws: Tensor, quant_block_shape: Sequence[int], use_e8m0: bool
) -> tuple[Tensor, Tensor]:
    """Lays a block-scaled weight out for DeepGEMM: [N, K] or experts [E, N, K].

    use_e8m0: re-quantises `wq` and `ws` to power-of-two scales first, in place (a second copy of
    all experts would not fit beside the first). Returns `wq` and its scales in the layout that
    DeepGEMM wants on this chip.
    """
    from vllm.utils.deep_gemm import transform_sf_into_required_layout

    _check_grid(wq, ws, quant_block_shape)
    if use_e8m0:
        requant_weight_ue8m0_inplace(wq, ws, quant_block_shape)
    num_experts = wq.shape[0] if wq.ndim == 3 else 1
    laid_out = transform_sf_into_required_layout(
        ws if wq.ndim == 3 else ws.unsqueeze(0),
        mn=wq.shape[-2],
        k=wq.shape[-1],
        recipe=(1, *quant_block_shape),
        num_groups=num_experts,
        is_sfa=False,
    )
    return wq, laid_out if wq.ndim == 3 else laid_out.squeeze(0)


# ---------------------------------------------------------------- activations


def per_token_group_quant_fp8(
    x: Tensor,
    group_size: int,
    eps: float = MIN_AMAX,
    dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    out_q: Tensor | None = None,
    use_ue8m0: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantises x [..., M, K] per token and group of `group_size` columns; the last may be partial.

    Returns q [..., M, K] (`out_q` where given) and scales float32 [..., M, ceil(K / group_size)],
    scale = max(max|group|, eps) / 448. column_major_scales: stride[-2] == 1. tma_aligned_scales:
    column-major too, with stride[-1] == get_tma_aligned_size(M, 4) and zeros as filling.
    use_ue8m0 rounds scales up to powers of two; None asks what DeepGEMM wants on this chip.
    """
    if use_ue8m0 is None:
        from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

        use_ue8m0 = is_deep_gemm_e8m0_used()
    if out_q is not None and out_q.shape != x.shape:
        raise ValueError(f"out_q is {tuple(out_q.shape)}, but x is {tuple(x.shape)}")
    dtype = dtype or (FP8 if out_q is None else out_q.dtype)
    num_groups = cdiv(x.shape[-1], group_size)
    filling = num_groups * group_size - x.shape[-1]
    groups = torch.nn.functional.pad(x.float(), (0, filling)).unflatten(-1, (-1, group_size))
    amax = groups.abs().amax(-1).clamp_(min=eps)
    scales = fp8_scales(amax, use_ue8m0, torch.finfo(dtype).max)
    q = round_to_fp8(groups, scales.unsqueeze(-1), dtype).flatten(-2)[..., : x.shape[-1]]
    q = q.contiguous() if out_q is None else out_q.copy_(q)
    if tma_aligned_scales:
        from vllm.utils.deep_gemm import get_col_major_tma_aligned_tensor

        scales = get_col_major_tma_aligned_tensor(scales)
    elif column_major_scales:
        by_column = scales.transpose(-1, -2).clone(memory_format=torch.contiguous_format)
        scales = by_column.transpose(-1, -2)
    return q, scales


def per_token_group_quant_fp8_packed_for_deepgemm(
    x: Tensor, group_size: int, eps: float = MIN_AMAX, use_ue8m0: bool | None = None
) -> tuple[Tensor, Tensor]:
    """As per_token_group_quant_fp8 of x [M, K], with the scales as DeepGEMM takes them on SM100.

    Scales: int32 [M, ceil(groups / 4)], MN-major (stride 1 along M, get_tma_aligned_size(M, 4)
    along the packs). Byte i of a pack (the lowest first) is the UE8M0 exponent byte of its i-th
    group, scale = 2 ** (byte - 127); bytes beyond the last group are 0.
    """
    if use_ue8m0 is False:
        raise ValueError("packed scales are exponent bytes: use_ue8m0=False has none; leave it out")
    from vllm.utils.deep_gemm import get_col_major_tma_aligned_tensor

    q, scales = per_token_group_quant_fp8(x, group_size, eps, use_ue8m0=True)
    # No check as pack_ue8m0 makes: these are powers of two or NaN (byte 255), and a check would
    # make the host wait for the device at every layer.
    exponents = (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    exponents = torch.nn.functional.pad(exponents, (0, -exponents.shape[-1] % 4))
    return q, get_col_major_tma_aligned_tensor(exponents.view(torch.int32))


# ---------------------------------------------------------------- products


def cutlass_scaled_mm(
    A: Tensor,
    B: Tensor,
    As: Tensor,
    Bs: Tensor,
    block_size: Sequence[int],
    output_dtype: torch.dtype = torch.float16,
) -> Tensor:
    """A [M, K] @ B [N, K].T of FP8 values with block scales -> [M, N] in `output_dtype`.

    As: float32 [M, K blocks]; Bs: float32 [N blocks, K blocks]; edge blocks may be partial. The
    sums in torch, float32 per block of K and then scaled, on any device; `cutlass_scaled_mm` among
    the custom operations runs the kernel.
    """
    return _block_scaled_mm(A, B, As, Bs, block_size).to(output_dtype)


def w8a8_triton_block_scaled_mm(
    A: Tensor,
    B: Tensor,
    As: Tensor,
    Bs: Tensor,
    block_size: Sequence[int],
    output_dtype: torch.dtype = torch.float16,
) -> Tensor:
    """The product of `cutlass_scaled_mm` by the Triton kernel on a GPU, elsewhere by torch.

    On a GPU: As in groups of 128 columns, output_dtype bfloat16 or float16.
    """
    if not A.is_cuda:
        return _block_scaled_mm(A, B, As, Bs, block_size).to(output_dtype)
    _check_product(A, B, As, Bs, block_size)
    from vllm.kernels.triton.linear import fp8_block_gemm

    y = A.new_empty(A.shape[0], B.shape[0], dtype=output_dtype)
    fp8_block_gemm(A.contiguous(), As.contiguous(), B, Bs.contiguous(), None, block_size, y)
    return y


def _check_product(A: Tensor, B: Tensor, As: Tensor, Bs: Tensor, block_size: Sequence[int]) -> None:
    _check_grid(B, Bs, block_size)
    _check_grid(A, As, (1, block_size[1]))
    if A.shape[1] != B.shape[1]:
        raise ValueError(f"A has {A.shape[1]} columns and B {B.shape[1]}: both are K")


def _block_scaled_mm(
    A: Tensor, B: Tensor, As: Tensor, Bs: Tensor, block_size: Sequence[int]
) -> Tensor:
    block_rows, block_columns = block_size
    _check_product(A, B, As, Bs, block_size)
    row_scales = Bs.repeat_interleave(block_rows, 0)[: B.shape[0]]
    total = A.new_zeros(A.shape[0], B.shape[0], dtype=torch.float32)
    for i in range(Bs.shape[1]):
        columns = slice(i * block_columns, (i + 1) * block_columns)
        product = A[:, columns].float() @ B[:, columns].float().T
        total += product * As[:, i : i + 1] * row_scales[:, i]
    return total


@dataclass(frozen=True, slots=True)
class W8A8BlockFp8LinearOp:
    """Quantise activations, then multiply with a block-scaled weight.

    use_deep_gemm was decided before: False never touches DeepGEMM nor UE8M0 scales, True always
    uses it (weight and scales as deepgemm_post_process_fp8_weight_block returns them), and only
    None asks at a call whether it can serve.
    """

    weight_group_shape: GroupShape
    act_quant_group_shape: GroupShape
    use_deep_gemm: bool | None = None

    def apply(
        self, input: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """input [..., K] @ weight [N, K].T (+ bias [N]) -> [..., N] of input's dtype."""
        x = input.reshape(-1, input.shape[-1])
        group = self.act_quant_group_shape.col
        if self._takes_deep_gemm(x, weight):
            y = _deep_gemm(x, weight, weight_scale, group)
        else:
            q, scales = per_token_group_quant_fp8(x, group, use_ue8m0=False)
            blocks = self.weight_group_shape
            y = cutlass_scaled_mm(q, weight, scales, weight_scale, blocks, x.dtype)
        if bias is not None:
            y = y + bias
        return y.view(*input.shape[:-1], -1)

    def _takes_deep_gemm(self, x: Tensor, weight: Tensor) -> bool:
        if self.use_deep_gemm is not None:
            return self.use_deep_gemm
        from vllm.utils.deep_gemm import should_use_deepgemm_for_fp8_linear

        return should_use_deepgemm_for_fp8_linear(x.dtype, weight)


def _deep_gemm(x: Tensor, weight: Tensor, weight_scale: Tensor, group_size: int) -> Tensor:
    from vllm.utils.deep_gemm import DeepGemmQuantScaleFMT, fp8_gemm_nt

    scale_format = DeepGemmQuantScaleFMT.from_oracle()
    if scale_format is DeepGemmQuantScaleFMT.UE8M0:
        quantised = per_token_group_quant_fp8_packed_for_deepgemm(x, group_size)
    else:
        is_ceil = scale_format is DeepGemmQuantScaleFMT.FLOAT32_CEIL_UE8M0
        quantised = per_token_group_quant_fp8(
            x, group_size, tma_aligned_scales=True, use_ue8m0=is_ceil
        )
    out = x.new_empty(x.shape[0], weight.shape[0])
    fp8_gemm_nt(quantised, (weight, weight_scale), out)
    return out
