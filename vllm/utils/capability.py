"""CUDA compute capability."""

from typing import NamedTuple


class DeviceCapability(NamedTuple):
    """Comparable with a plain tuple."""

    major: int
    minor: int

    def to_int(self) -> int:
        """`major * 10 + minor`: 90 for 9.0, 121 for 12.1."""
        return self.major * 10 + self.minor

    @property
    def family(self) -> int:
        """`capability // 10 * 10`: 12.1 belongs to family 120 and never to family 100."""
        return self.major * 10

    @classmethod
    def parse(cls, capability: "int | tuple[int, int]") -> "DeviceCapability":
        """From 90, 121 or (9, 0)."""
        return cls(*(capability if isinstance(capability, tuple) else divmod(capability, 10)))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"
