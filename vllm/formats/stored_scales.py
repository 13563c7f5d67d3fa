"""Whether a checkpoint's block scales are powers of two, so that UE8M0 holds them exactly."""

import copy
from pathlib import Path

from vllm.formats.readers.base import QuantizationConfig
from vllm.utils.safetensors_files import StoredTensor, stored_tensors

# What readers call the scales of FP8 blocks; of other formats nothing is asked here.
_SCALES = (".weight_scale_inv", "_proj_scale_inv", ".weight_scale")
# Of scales in layers of other formats, of which a checkpoint may have some.
_OF_OTHER_FORMATS = ("F8_E4M3", "U8")


def with_stored_scales(
    quant: QuantizationConfig | None, folder: Path | None
) -> QuantizationConfig | None:
    """`quant` with `exact_scales` as the scale tensors in `folder` have it, which outrank what the
    config says of them; as it is where there are none."""
    if quant is None or not quant.can_use_deep_gemm or folder is None or not folder.is_dir():
        return quant
    named = (one for one in stored_tensors(folder) if one.name.endswith(_SCALES))
    scales = [one for one in named if one.dtype not in _OF_OTHER_FORMATS]
    if not scales:
        return quant
    found = copy.copy(quant)
    is_exact = all(map(_holds_powers_of_two, scales))
    found.exact_scales = "the checkpoint's scales are powers of two" if is_exact else ""
    return found


def _holds_powers_of_two(scales: StoredTensor) -> bool:
    """Whether every scale is 2^-126 to 2^127: of little-endian floats, sign and mantissa are 0."""
    if scales.dtype == "F8_E8M0":
        return True
    if scales.dtype not in ("F32", "BF16"):
        return False
    size = 4 if scales.dtype == "F32" else 2
    content = scales.read()
    # bfloat16 is the upper half of float32: sign and exponent, then mantissa bits from 0x40 down.
    low, high = content[size - 2 :: size], content[size - 1 :: size]
    if size == 4 and (content[0::4].strip(b"\0") or content[1::4].strip(b"\0")):
        return False
    exponents = {(high[i] << 1) | (low[i] >> 7) for i in range(len(high))}
    return set(low) <= {0x00, 0x80} and max(high, default=0) < 0x80 and not exponents & {0, 255}
