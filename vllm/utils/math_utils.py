"""Integer arithmetic. Triton has such functions too, which cost the host microseconds a call."""


def cdiv(a: int, b: int) -> int:
    """a / b rounded up, for a >= 0 and b > 0."""
    return -(a // -b)


def round_up(a: int, b: int) -> int:
    """The smallest multiple of b that is at least a."""
    return cdiv(a, b) * b


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, and 1 for n < 1."""
    return 1 << max(n - 1, 0).bit_length()
