"""What was asked for, as values: who may be overridden or excluded, and by whom."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from vllm.errors import ConfigError
from vllm.kernels.select.problem import Problem
from vllm.kernels.select.reason import Why
from vllm.kernels.select.spec import KernelSpec


@dataclass(frozen=True, slots=True)
class Origin:
    """Who decided. Rank 1 is the strongest (docs/kernels.md lists the ranks)."""

    rank: int
    text: str


RANK_LAYER, RANK_FLAG, RANK_VARIABLE, RANK_CONFIG, RANK_MODEL_RULE, RANK_MEASURED = range(1, 7)
DEFAULT_ORDER = Origin(7, "default order")


@dataclass(frozen=True, slots=True)
class Override:
    """`backend` is to serve the layers of `family` whose name matches the glob `pattern`.

    formats: only problems in these weight formats are meant; empty for all that the backend has a
    kernel for. yields_to: kinds of reasons; a layer that the backend cannot take for these alone
    goes to the next kernel, with the reasons recorded.
    """

    family: str
    backend: str
    origin: Origin
    pattern: str = "*"
    formats: frozenset[str] = frozenset()
    yields_to: frozenset[Why] = frozenset()

    def matches(self, layer: str) -> bool:
        return self.pattern == "*" or fnmatchcase(layer, self.pattern)

    def applies_to(self, layer: str, problem: Problem, specs: Iterable[KernelSpec]) -> bool:
        """Whether it means this layer; specs: of the problem's family.

        One that names a whole family means the formats its backend has a kernel for: an override
        with an FP8 backend says nothing about an output projection in bf16.
        """
        if self.family != problem.family or not self.matches(layer):
            return False
        if self.pattern != "*":
            return True
        if self.formats:
            return problem.format in self.formats
        return any(problem.format in spec.formats for spec in specs if spec.backend == self.backend)


@dataclass(frozen=True, slots=True)
class Exclusion:
    """`backend` is not to serve `family`."""

    family: str
    backend: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything that was asked for. e8m0: VLLM_USE_DEEP_GEMM_E8M0, None for automatic.

    max_requant_error: greatest relative Frobenius error that re-quantising a weight may cause.
    """

    overrides: tuple[Override, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()
    falls_back: bool = False
    requires_native: bool = False
    e8m0: bool | None = None
    max_requant_error: float | None = None

    def override_of(
        self, layer: str, problem: Problem, specs: Iterable[KernelSpec]
    ) -> Override | None:
        """The strongest override of this layer; ConfigError where two of one rank disagree."""
        meant = [o for o in self.overrides if o.applies_to(layer, problem, specs)]
        first = min(meant, key=lambda override: override.origin.rank, default=None)
        for other in meant:
            assert first is not None
            if other.origin.rank == first.origin.rank and other.backend != first.backend:
                raise ConfigError(
                    f"{first.origin.text} and {other.origin.text} both mean {layer}: narrow one"
                )
        return first

    def exclusion_of(self, backend: str, family: str) -> Exclusion | None:
        """The strongest exclusion of this backend from this family."""
        own = (e for e in self.exclusions if (e.backend, e.family) == (backend, family))
        return min(own, key=lambda exclusion: exclusion.origin.rank, default=None)
