"""Integer arithmetic."""


def cdiv(a: int, b: int) -> int:
    """a / b rounded up, for a >= 0 and b > 0."""
    return -(a // -b)


def round_up(a: int, b: int) -> int:
    """The smallest multiple of b that is at least a."""
    return cdiv(a, b) * b
