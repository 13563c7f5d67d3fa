"""Order of release numbers."""


def version_key(version: str) -> tuple[int, ...]:
    """`0.6.13.post1` -> (0, 6, 13, 1): enough order for release numbers."""
    digits = "".join(c if c.isdigit() else " " for c in version)
    return tuple(int(part) for part in digits.split())
