"""Products of quantised matrices with the native CUDA kernels, as torch custom ops.

CPU tensors are computed by torch references: float32 sums of the numbers that the format defines.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from vllm.ops.fp8 import block_scaled_mm
from vllm.ops.nvfp4 import GROUP, TILE_ROWS, e2m1_decode, unpack_e2m1, unswizzle_scales
from vllm.ops.torch_library import register
from vllm.utils.fp8 import FP8
from vllm.utils.math_utils import cdiv, round_up

_BLOCK = 128


def _fp8_block_gemm(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    product = block_scaled_mm(a, b, a_scales, b_scales, (_BLOCK, _BLOCK))
    out.copy_(product if bias is None else product + bias)


def _fp8_block_gemm_grouped(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, offsets: Tensor, out: Tensor
) -> None:
    for expert, (begin, end) in enumerate(pairwise(offsets.tolist())):
        rows = slice(begin, end)
        _fp8_block_gemm(a[rows], a_scales[rows], b[expert], b_scales[expert], None, out[rows])


def _nvfp4_gemm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    alpha: Tensor,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    product = alpha * (_nvfp4_values(a, a_scales) @ _nvfp4_values(b, b_scales).T)
    out.copy_(product if bias is None else product + bias)


def _nvfp4_gemm_grouped(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    alpha: Tensor,
    offsets: Tensor,
    out: Tensor,
) -> None:
    num_experts, n = offsets.shape[0] - 1, b.shape[1]
    num_parts = b.shape[0] // num_experts
    start = 0
    for expert, (begin, end) in enumerate(pairwise(offsets.tolist())):
        rows, stop = slice(begin, end), start + round_up(end - begin, TILE_ROWS)
        for part in range(num_parts):
            one, place = expert * num_parts + part, slice(part * n, (part + 1) * n)
            operands = a[rows], a_scales[start:stop], b[one], b_scales[one], alpha[one]
            _nvfp4_gemm(*operands, None, out[rows, place])
        start = stop


def _nvfp4_values(packed: Tensor, swizzled: Tensor) -> Tensor:
    num_rows, num_columns = packed.shape[0], 2 * packed.shape[1]
    scales = unswizzle_scales(swizzled, num_rows, cdiv(num_columns, GROUP)).float()
    return e2m1_decode(unpack_e2m1(packed)) * scales.repeat_interleave(GROUP, 1)[:, :num_columns]


_ARGS = "Tensor a, Tensor a_scales, Tensor b, Tensor b_scales"
cutlass_fp8_block_gemm = register(
    f"cutlass_fp8_block_gemm({_ARGS}, Tensor? bias, Tensor(a!) out) -> ()", _fp8_block_gemm
)
cutlass_fp8_block_gemm_grouped = register(
    f"cutlass_fp8_block_gemm_grouped({_ARGS}, Tensor offsets, Tensor(a!) out) -> ()",
    _fp8_block_gemm_grouped,
)
cutlass_nvfp4_gemm = register(
    f"cutlass_nvfp4_gemm({_ARGS}, Tensor alpha, Tensor? bias, Tensor(a!) out) -> ()", _nvfp4_gemm
)
cutlass_nvfp4_gemm_grouped = register(
    f"cutlass_nvfp4_gemm_grouped({_ARGS}, Tensor alpha, Tensor offsets, Tensor(a!) out) -> ()",
    _nvfp4_gemm_grouped,
)


def cutlass_scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """(a * scale_a) [M, K] @ (b * scale_b) [K, N] (+ bias [N]) in bfloat16 or float16.

    a: float8_e4m3fn, row-major; b: float8_e4m3fn, the transposed view of a weight [N, K]. float32
    scales, of one kind on each side: a scalar; one per row of a ([M, 1]) or column of b ([1, N]);
    or 1x128 groups of a ([M, ceil(K / 128)]) with 128x128 blocks of b ([ceil(K / 128),
    ceil(N / 128)]). Block scales run the native kernel on CUDA (K a multiple of 16), the others
    torch's. ValueError for other types and shapes.
    """
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dtype != FP8 or tensor.dim() != 2:
            raise ValueError(
                f"{name}: given {tensor.dtype} of {tensor.dim()} dimensions; accepted: "
                f"float8_e4m3fn matrices"
            )
    if out_dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"out_dtype: given {out_dtype}; accepted: bfloat16, float16")
    m, k = a.shape
    if b.shape[0] != k:
        raise ValueError(f"b: given {b.shape[0]} rows; accepted: {k}, the columns of a")
    n = b.shape[1]
    k_blocks, n_blocks = cdiv(k, _BLOCK), cdiv(n, _BLOCK)
    if scale_a.shape == (m, k_blocks) and scale_b.shape == (k_blocks, n_blocks):
        grid = scale_b.t().contiguous()
        wide_bias = None if bias is None else bias.float()
        block = (_BLOCK, _BLOCK)
        return cutlass_block_scaled_mm(a, b.t(), scale_a, grid, block, out_dtype, wide_bias)
    if scale_a.numel() not in (1, m) or scale_b.numel() not in (1, n):
        raise ValueError(
            f"scale_a, scale_b: given shapes {tuple(scale_a.shape)} and {tuple(scale_b.shape)}; "
            f"accepted: scalars, [{m}, 1] with [1, {n}], or [{m}, {k_blocks}] with "
            f"[{k_blocks}, {n_blocks}]"
        )
    return _plain_scaled_mm(a, b, scale_a, scale_b, out_dtype, bias)


def cutlass_block_scaled_mm(
    A: Tensor,
    B: Tensor,
    As: Tensor,
    Bs: Tensor,
    block_size: Sequence[int],
    output_dtype: torch.dtype = torch.float16,
    bias: Tensor | None = None,
) -> Tensor:
    """A [M, K] @ B [N, K].T (+ bias float32 [N]) of FP8 values with block scales.

    As: float32 [M, K blocks]; Bs: float32 [N blocks, K blocks]; edge blocks may be partial. 128x128
    blocks and an output in bfloat16 or float16 run the native kernel on CUDA (K a multiple of 16),
    others torch.
    """
    is_half = output_dtype in (torch.bfloat16, torch.float16)
    if not is_half or tuple(block_size) != (_BLOCK, _BLOCK):
        product = block_scaled_mm(A, B, As, Bs, block_size)
        return (product if bias is None else product + bias).to(output_dtype)
    out = A.new_empty(A.shape[0], B.shape[0], dtype=output_dtype)
    cutlass_fp8_block_gemm(A, As, B, Bs, bias, out)
    return out


def _plain_scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    if not a.shape[0]:
        return a.new_empty(0, b.shape[1], dtype=out_dtype)
    is_per_tensor = scale_a.numel() == 1 and scale_b.numel() == 1
    if a.is_cuda and (is_per_tensor or out_dtype == torch.bfloat16):
        if not is_per_tensor:  # torch takes one scale on both sides, or one per row and column
            scale_a = scale_a.reshape(-1, 1).expand(a.shape[0], 1).contiguous()
            scale_b = scale_b.reshape(1, -1).expand(1, b.shape[1]).contiguous()
        out = torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out_dtype)
        return out if bias is None else out + bias.to(out_dtype)
    product = (a.float() * scale_a.reshape(-1, 1)) @ (b.float() * scale_b.reshape(1, -1))
    return (product if bias is None else product + bias).to(out_dtype)


def cutlass_scaled_fp4_mm(
    a: Tensor,
    b: Tensor,
    block_scale_a: Tensor,
    block_scale_b: Tensor,
    alpha: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """alpha * (a * block_scale_a) [M, K] @ ((b * block_scale_b) [N, K]).T in `out_dtype`.

    a uint8 [M, K / 2] and b uint8 [N, K / 2]: pairs of E2M1, the even column in the low nibble.
    Scales: E4M3 per 16 columns, swizzled, as `scaled_fp4_quant` writes them. alpha: float32 [1].
    On CUDA: capability families 100 and 120 (not run on hardware), bfloat16 or float16.
    """
    if a.dtype != torch.uint8 or b.dtype != torch.uint8 or a.shape[1] != b.shape[1]:
        raise ValueError(
            f"a, b: given {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}; accepted: "
            f"uint8 [M, K / 2] and [N, K / 2]"
        )
    out = a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)
    cutlass_nvfp4_gemm(a, block_scale_a, b, block_scale_b, alpha.reshape(1), None, out)
    return out
