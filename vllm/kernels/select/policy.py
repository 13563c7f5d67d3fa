"""What was asked for, as values: who may be overridden or excluded, and by whom."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cached_property

from vllm.errors import ConfigError
from vllm.kernels.select.grade import Grade
from vllm.kernels.select.problem import Problem
from vllm.kernels.select.reason import Origin
from vllm.kernels.select.spec import KernelSpec
from vllm.utils.dataclasses import dataclass


@dataclass(frozen=True)
class Override:
    """`backend` is to serve the layers of `family` whose name matches the glob `pattern`.

    formats: only problems in these weight formats are meant; empty for all that the backend has a
    kernel for.
    """

    family: str
    backend: str
    origin: Origin
    pattern: str = "*"
    formats: frozenset[str] = frozenset()

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


@dataclass(frozen=True)
class Preference:
    """For or against `backend` in `family`: `Policy.preferred` or `Policy.exclusions`.

    spares_exact: an exclusion does not hold for weights that the backend takes unrounded.
    """

    family: str
    backend: str
    origin: Origin
    spares_exact: bool = False


@dataclass(frozen=True)
class Budget:
    """The greatest relative Frobenius error that bringing a weight's scales to another form may
    cause. forms: those that are meant, empty for all."""

    error: float
    origin: Origin
    forms: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Policy:
    """Everything that was asked for. exclusions: backends that are not to serve. preferred: those
    that come before the default order, where measurements still decide. e8m0:
    VLLM_USE_DEEP_GEMM_E8M0, None for automatic. least_grade: what must be known of a kernel."""

    overrides: tuple[Override, ...] = ()
    exclusions: tuple[Preference, ...] = ()
    preferred: tuple[Preference, ...] = ()
    falls_back: bool = False
    requires_native: bool = False
    least_grade: Grade = Grade.COMPILED
    e8m0: bool | None = None
    budgets: tuple[Budget, ...] = ()

    @cached_property
    def excluded(self) -> frozenset[str]:
        """Backends that `exclusions` name."""
        return frozenset(one.backend for one in self.exclusions)

    @cached_property
    def judges(self) -> bool:
        """Whether it may speak against kernels that `exclusions` do not name."""
        return self.requires_native or self.least_grade is not Grade.COMPILED

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

    def exclusion_of(self, backend: str, family: str, is_exact: bool) -> Preference | None:
        """is_exact: it would take the weight unrounded."""
        held = (e for e in self.exclusions if not (is_exact and e.spares_exact))
        return _strongest(held, backend, family)

    def preference_of(self, backend: str, family: str) -> Preference | None:
        return _strongest(self.preferred, backend, family)


def _strongest(entries: Iterable[Preference], backend: str, family: str) -> Preference | None:
    own = (entry for entry in entries if (entry.backend, entry.family) == (backend, family))
    return min(own, key=lambda entry: entry.origin.rank, default=None)
