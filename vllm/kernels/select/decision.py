"""What was decided: every candidate with its reasons, the chosen one, and who decided."""

from abc import ABC, abstractmethod
from functools import cached_property

from vllm.errors import VllmError
from vllm.formats.act_scheme import ActScheme
from vllm.formats.partial_blocks import Fit
from vllm.formats.scales import Requant, Scales
from vllm.kernels.select.grade import Grade
from vllm.kernels.select.problem import Problem
from vllm.kernels.select.reason import Origin, Reason
from vllm.machine import Device
from vllm.utils.dataclasses import dataclass, field

Parts = tuple[tuple[int | None, str], ...]
"""A split by M: (largest M, backend), ascending; the last has None for no limit."""


def serving(parts: Parts, num_tokens: int) -> str:
    """The backend of so many tokens."""
    return next(name for limit, name in parts if limit is None or num_tokens <= limit)


Able = tuple[tuple[str, int | None], ...]
"""Backends that can run, in the default order, each with the most tokens it takes in a call."""


Layouts = tuple[tuple[str, tuple[str, ...]], ...]
"""Of backends that do not take the weight as it is stored, or not only so, the layouts that they
take (`KernelSpec.weight_layouts`)."""


Roundings = tuple[tuple[str, int], ...]
"""Of backends that round, how often: activations, and the weight once more."""


ByBackend = tuple[tuple[str, tuple[float | None, ...]], ...]
"""By backend a number for each token count; None where there is none."""


@dataclass(frozen=True, compiled=True)
class Evidence(ABC):
    """What is known of the times of one problem on one kind of chip.

    us: by backend, microseconds of one call with as many rows as the entry of `tokens` (ascending)
    says; None where that was not measured. source: which table says so, and how old it is. stale:
    (backend, what was measured, what is here) where that is another version or build. grade: of
    the times that are not stale. error: by backend, the mean relative error for each of `tokens`
    where the times are not measured here, () where they are. noise: relative uncertainty of each
    of `us`; () where it is not known. steps: of attention, what each of `tokens` are the new tokens
    of (`kernels/evidence/steps.py`); () of other problems. before: what would choose without what
    a user measured; its choice stays for differences that a second measurement may not show.
    """

    source: str
    tokens: tuple[int, ...]
    us: ByBackend
    stale: tuple[tuple[str, str, str], ...] = ()
    grade: Grade = Grade.MEASURED
    error: tuple[tuple[str, tuple[float, ...]], ...] = ()
    noise: ByBackend = ()
    steps: tuple[str, ...] = ()
    before: "Evidence | None" = field(default=None, compare=False)

    @property
    def columns(self) -> "tuple[int | str, ...]":
        """What tables file times under: names of steps, or numbers of tokens."""
        return self.steps or self.tokens

    @abstractmethod
    def best_split(
        self,
        able: Able,
        m_range: tuple[int, int],
        compiling: tuple[str, ...],
        layouts: "Layouts",
        roundings: Roundings,
    ) -> Parts:
        """The fastest parts (`kernels/evidence/splits.py`)."""


@dataclass(frozen=True, compiled=True)
class FasterInBf16:
    """Numbers of tokens for which others measured the same layer in bf16 to be faster than the
    chosen kernel. ratio: the largest of its time over that of bf16, for `worst_tokens`.
    num_compared: numbers of tokens that were measured in both."""

    ratio: float
    worst_tokens: int
    tokens: tuple[int, ...]
    num_compared: int
    source: str


@dataclass(frozen=True, compiled=True)
class Candidate:
    """A kernel that was considered; no reasons against it means it could run.

    scales: the form of weight scales it would take, "" where that does not matter. requant: what
    bringing the stored ones to that form costs; None where it takes them as they are. fit: how it
    takes partial scale blocks. parts: of a split, each of which is a candidate of its own, with its
    own act; act, scales and fit of the split are those of its last. grade: what is known of it, of
    a split the least of its parts.
    """

    backend: str
    act: ActScheme | None
    scales: str = ""
    fit: Fit | None = None
    parts: Parts = ()
    requant: Requant | None = None
    reasons: tuple[Reason, ...] = ()
    grade: Grade = Grade.COMPILED

    @property
    def rescales(self) -> bool:
        """Whether the weight is brought to another form of scales for it."""
        return self.scales not in ("", Scales.FLOAT32)

    @property
    def roundings(self) -> int:
        """How often it rounds: activations, and the weight once more."""
        return self.is_lossy + (self.act not in (None, ActScheme.NONE))

    @property
    def is_lossy(self) -> bool:
        """Whether that rounds the weight, for all that is known."""
        return self.requant is not None and self.requant.error > 0


@dataclass(frozen=True, compiled=True)
class Decision:
    """The choice for one problem, with every candidate in order of preference.

    timings: measurements of this problem on this chip, None where there are none. is_emulated:
    `device` is not at hand; the numbers of the chosen kernel are computed on what is.
    faster_in_bf16: None where nobody measured that.
    """

    problem: Problem
    device: Device
    chosen: str | None
    origin: Origin
    candidates: tuple[Candidate, ...] = ()
    timings: Evidence | None = None
    is_emulated: bool = False
    faster_in_bf16: FasterInBf16 | None = None

    @property
    def kernel(self) -> str | None:
        """The chosen backend as shown to people: with the chip whose numbers it emulates."""
        is_emulated = self.is_emulated and self.chosen is not None
        return f"{self.chosen} of {self.device}, emulated" if is_emulated else self.chosen

    @cached_property
    def winner(self) -> Candidate:
        """The chosen candidate; only where there is one."""
        return next(c for c in self.candidates if c.backend == self.chosen)

    @cached_property
    def parts(self) -> Parts:
        """By numbers of tokens what serves, whether that is a split or not; () for nothing."""
        return () if self.chosen is None else self.winner.parts or ((None, self.chosen),)

    def backend_for(self, num_tokens: int) -> str:
        """What serves so many tokens; only where something does."""
        return serving(self.parts, num_tokens)


Record = tuple[str, Decision]
"""A layer's name and what was decided for it."""


class NoKernelError(VllmError):
    """No kernel can serve a problem, or the override's backend cannot."""

    def __init__(self, message: str, decision: Decision):
        super().__init__(message)
        self.decision = decision

    def __reduce__(self) -> tuple[type["NoKernelError"], tuple[str, Decision]]:
        """Keeps the decision when the error is sent to another process."""
        return type(self), (str(self), self.decision)
