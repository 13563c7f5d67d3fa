"""Why a kernel is rejected."""

from enum import StrEnum

from vllm.utils.dataclasses import dataclass, field


class Why(StrEnum):
    """The kind of a reason. Tests match on this, never on the text."""

    DEVICE = "device"
    LIBRARY = "library"
    FORMAT = "format"
    SHAPE = "shape"
    DTYPE = "dtype"
    POLICY = "policy"
    NUMERICS = "numerics"


@dataclass(frozen=True, compiled=True)
class Origin:
    """Who decided. Rank 1 is the strongest (docs/kernels.md lists the ranks)."""

    rank: int
    text: str


RANK_LAYER, RANK_FLAG, RANK_VARIABLE, RANK_CONFIG, RANK_ACCURACY, RANK_MEASURED = range(1, 7)
DEFAULT_ORDER = Origin(7, "default order")


@dataclass(frozen=True, compiled=True)
class Reason:
    """origin: who asked for it, where the kernel could run but for what was asked."""

    why: Why
    text: str
    origin: Origin | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.why}: {self.text}"
