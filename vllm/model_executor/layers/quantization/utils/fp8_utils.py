"""FP8 (E4M3) arithmetic of checkpoints."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm.utils.math_utils import cdiv

FP8_MAX = 448.0


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
    scales = torch.where(amax > 0, amax / FP8_MAX, torch.ones_like(amax))
    if use_ue8m0:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    quantised = (blocks / scales[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX)
    quantised = quantised.view_as(padded)[:num_rows, :num_columns].to(torch.float8_e4m3fn)
    return quantised.contiguous(), scales
