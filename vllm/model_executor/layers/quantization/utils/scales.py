"""Scales of a checkpoint, checked where they are read."""

from collections.abc import Callable

import torch
from torch import Tensor


def write_scales(
    target: Tensor, is_divisor: bool = False, may_be_zero: bool = True
) -> Callable[[Tensor], None]:
    """A writer of scales, or of the factors that divisors stand for; a single one fills `target`.

    It raises ValueError for NaN, infinity and negative ones, and for zero where it may not be.
    """

    def write(tensor: Tensor) -> None:
        wide = tensor.float()
        in_range = wide >= 0 if may_be_zero else wide > 0
        if not bool((torch.isfinite(wide) & in_range).all()):
            wanted = "not negative" if may_be_zero else "above zero"
            raise ValueError(
                f"scales must be finite and {wanted}; it holds {_worst(wide)}: the checkpoint is "
                f"corrupt, fetch or quantise it again"
            )
        factors = 1 / wide if is_divisor else wide
        if factors.numel() == target.numel():
            factors = factors.reshape(target.shape)
        target.copy_(factors)

    return write


def _worst(scales: Tensor) -> float:
    """A value that shows what is wrong: NaN if there is one, or else the smallest or infinity."""
    if bool(scales.isnan().any()):
        return float("nan")
    return float(scales.max() if bool(scales.isinf().any()) else scales.min())
