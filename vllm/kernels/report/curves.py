"""Times of the kernels of one decision over the number of tokens: what pictures are drawn from."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from vllm.kernels import registry
from vllm.kernels.select.decision import Decision
from vllm.kernels.select.grade import Grade
from vllm.kernels.select.problem import WeightProblem
from vllm.kernels.select.reason import Why

# Told apart with any kind of colour vision first (Okabe and Ito), on light and on dark ground.
PALETTE = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7b4fb5",
    "#7f7f7f", "#b3263f", "#5a8f00",
)  # fmt: skip


class Point(NamedTuple):
    """Microseconds of a call. error: relative, of what is not measured here; 0 where it is not
    known. is_chosen: whether the decision has this kernel for so many tokens."""

    tokens: int
    us: float
    error: float
    is_chosen: bool


class Curve(NamedTuple):
    """One kernel. is_measured: timed for this problem, on this chip, with the versions that are
    here; else estimated, or timed by others. can_run: for some number of tokens."""

    backend: str
    is_measured: bool
    can_run: bool
    points: tuple[Point, ...]


def curves_of(decision: Decision) -> tuple[Curve, ...]:
    """In the order of the table; () where no time is known."""
    timings = decision.timings
    if timings is None or not isinstance(decision.problem, WeightProblem):
        return ()
    stale = {backend for backend, *_ in timings.stale}
    errors = dict(timings.error)
    # A kernel that takes few tokens only has that against it as a whole.
    able = {c.backend for c in decision.candidates if all(r.why is Why.SHAPE for r in c.reasons)}
    no_error = (0.0,) * len(timings.tokens)
    found = []
    for backend, us in timings.us:
        points = tuple(
            Point(tokens, time, error, kernel_for(decision, tokens) == backend)
            for tokens, time, error in zip(timings.tokens, us, errors.get(backend, no_error))
            if time is not None
        )
        is_measured = timings.grade is Grade.MEASURED and backend not in stale
        if points:
            found.append(Curve(backend, is_measured, backend in able, points))
    return tuple(found)


def kernel_for(decision: Decision, num_tokens: int) -> str | None:
    """The backend that serves so many tokens; None where none does."""
    return None if decision.chosen is None else decision.backend_for(num_tokens)


def chosen_ranges(points: Sequence[Point]) -> list[list[Point]]:
    """Runs of points for which the kernel is chosen."""
    runs: list[list[Point]] = []
    is_open = False
    for point in points:
        if point.is_chosen and not is_open:
            runs.append([])
        if point.is_chosen:
            runs[-1].append(point)
        is_open = point.is_chosen
    return runs


def colours(curves: Iterable[Curve]) -> dict[str, str]:
    """By backend, in the default order; the same in all pictures that are drawn from `curves`."""
    used = {curve.backend for curve in curves}
    known = chain.from_iterable(map(registry.backend_names, registry.FAMILIES))
    ordered = [name for name in dict.fromkeys((*known, *sorted(used))) if name in used]
    return {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(ordered)}
