"""E4M3 in numpy, from its definition: sign, 4 exponent bits (bias 7), 3 mantissa bits."""

import numpy as np

# Every finite value of codes 0 to 126, ascending; code 127 is NaN.
VALUES = np.array(
    [
        mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        for exponent in range(16)
        for mantissa in range(8)
    ][:127]
)


def encode(x: np.ndarray) -> np.ndarray:
    """Codes nearest to x (any float type), ties to the even code, saturating; uint8."""
    magnitude = np.abs(x).astype(np.float64)
    above = np.searchsorted(VALUES, magnitude).clip(1, 126)
    below = above - 1
    to_above, to_below = VALUES[above] - magnitude, magnitude - VALUES[below]
    is_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    code = np.where(is_above, above, below)
    return (code | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def decode(codes: np.ndarray) -> np.ndarray:
    """float64 values of finite codes."""
    return np.where(codes & 0x80, -1.0, 1.0) * VALUES[codes & 0x7F]


def scale_of(amax: np.ndarray, use_ue8m0: bool) -> np.ndarray:
    """float32 amax / 448, or the least power of two that is not below it."""
    scale = (amax.astype(np.float32) / np.float32(448)).astype(np.float32)
    if not use_ue8m0:
        return scale
    mantissa, exponent = np.frexp(scale)  # scale = mantissa * 2 ** exponent, 0.5 <= mantissa < 1
    return np.ldexp(np.float32(1), np.where(mantissa == 0.5, exponent - 1, exponent))
