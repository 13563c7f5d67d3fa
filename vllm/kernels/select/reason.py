"""Why a kernel is rejected."""

from dataclasses import dataclass
from enum import StrEnum


class Why(StrEnum):
    """The kind of a reason. Tests match on this, never on the text."""

    DEVICE = "device"
    LIBRARY = "library"
    FORMAT = "format"
    SHAPE = "shape"
    DTYPE = "dtype"
    POLICY = "policy"
    NUMERICS = "numerics"


@dataclass(frozen=True, slots=True)
class Reason:
    why: Why
    text: str

    def __str__(self) -> str:
        return f"{self.why}: {self.text}"
