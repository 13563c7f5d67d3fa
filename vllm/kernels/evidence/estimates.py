"""Estimates for sizes that nobody measured, by the cost model of `cost_model.py`.

An estimate has the form of a measurement, so that one function chooses by both, and the error that
the model had on measured sizes that were left out of its fit. Standard library only.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from vllm.kernels.evidence.cost_model import (
    FITTED,
    RANGES,
    Fitted,
    KernelCost,
    KindCost,
    RangeCost,
    Sizes,
    dimensions,
    kind_of_problem,
    path_of_fitted,
    read_fitted,
)
from vllm.kernels.evidence.splits import Timings
from vllm.kernels.evidence.tables import Chip, user_folder
from vllm.kernels.evidence.versions import is_same
from vllm.kernels.select.grade import Grade
from vllm.kernels.select.problem import LinearProblem, MoEProblem, Problem, WeightProblem
from vllm.utils.dataclasses import replace

Times = tuple[tuple[str, tuple[float | None, ...]], ...]
"""As `Timings.us`."""
Stale = tuple[tuple[str, str, str], ...]
"""As `Timings.stale`."""

# How many times smaller or larger than all that was measured a size may be.
REACH = 4


# ---------------------------------------------------------------- which


def find_fitted(chip: Chip) -> tuple["Costs", ...]:
    """Of this chip, the user's first, then of chips with other memory; ConfigError if broken."""
    folders = path_of_fitted(user_folder() / "_").parent, FITTED
    pattern = f"{chip.device.arch}[-_]*.json"
    every = [read_fitted(path) for folder in folders for path in sorted(folder.glob(pattern))]
    own = [fitted for fitted in every if fitted.chip.is_like(chip)]
    any_memory = replace(chip, memory_gb_per_s=0)
    near = [f for f in every if f not in own and f.chip.is_like(any_memory)]
    return tuple(map(Costs, (*own, *(replace(fitted, is_near=True) for fitted in near))))


def estimate_of(
    costs: Sequence["Costs"], problem: Problem, versions: Mapping[str, str] | None = None
) -> Timings | None:
    """The first that knows problems of this kind with such sizes; None where none does.

    Neither is anything known of partial scale blocks, nor of experts' tokens in a padded layout.
    Experts that ranks share have the sizes of a rank. versions: by backend, what is here.
    """
    if not isinstance(problem, WeightProblem):
        return None
    if isinstance(problem, MoEProblem) and problem.layout != "standard":
        return None
    if problem.block_fit(takes_any_block=False) is not None:
        return None
    for one in costs:
        if (found := one.estimate(problem, versions)) is not None:
            return found
    return None


def sizes_of(problem: WeightProblem) -> Sizes:
    """As of `cost_model.kind_of`."""
    if isinstance(problem, LinearProblem):
        return problem.n, problem.k
    ranks = problem.cut_experts
    return problem.num_experts, problem.intermediate, problem.hidden, problem.top_k, ranks


# ---------------------------------------------------------------- evaluation

# What follows is `terms` times the numbers, for every kernel and number of tokens in a few
# microseconds: what does not depend on the number of tokens is computed once for a range.


class Costs:
    """The costs of one chip, laid out for evaluation."""

    def __init__(self, fitted: Fitted):
        self.fitted = fitted
        self._num_sms = fitted.chip.num_sms or 1
        self._kinds: dict[str, _Kind] = {}
        near = "; another chip" if fitted.is_near else ""
        source = f"{fitted.source} ({fitted.name}, {fitted.date}{near}"
        self._source, self._source_beyond = (
            f"{source}{others})" for others in ("", "; beyond the sizes that were measured")
        )

    def estimate(
        self, problem: WeightProblem, versions: Mapping[str, str] | None = None
    ) -> Timings | None:
        """None for a kind of problem that was not measured, or sizes out of reach."""
        kind = self._kind(kind_of_problem(problem))
        if kind is None:
            return None
        sizes = sizes_of(problem)
        is_beyond = False
        for size, (low, high) in zip(dimensions(sizes), kind.cost.measured):
            if not low <= size <= high:
                if not low <= size * REACH <= high * REACH * REACH:
                    return None
                is_beyond = True
        kernels = kind.quantised if problem.comes_quantised else kind.unquantised
        stale = kernels.stale(versions) if versions else ()
        is_far = is_beyond or self.fitted.is_near
        error = kernels.error_beyond if is_far else kernels.error
        us = kernels.us(sizes)
        source = self._source_beyond if is_beyond else self._source
        return Timings(source, kind.cost.tokens, us, stale, Grade.ESTIMATED, error)

    def _kind(self, name: str) -> "_Kind | None":
        if name not in self._kinds and name in self.fitted.kinds:
            self._kinds[name] = _Kind(self.fitted.kinds[name], self._num_sms)
        return self._kinds.get(name)


class _Kind:
    """Kernels for inputs that come quantised, and for those that do not."""

    def __init__(self, cost: KindCost, num_sms: int):
        self.cost = cost
        self._num_sms = num_sms

    @cached_property
    def quantised(self) -> "_LinearKernels | _ExpertKernels":
        """Kernels that take quantised input with that, all others without."""
        by_backend = {kernel.backend: kernel for kernel in self._others}
        by_backend |= {k.backend: k for k in self.cost.kernels if k.takes_quantised}
        return self._laid_out(tuple(by_backend.values()))

    @cached_property
    def unquantised(self) -> "_LinearKernels | _ExpertKernels":
        return self._laid_out(self._others)

    @property
    def _others(self) -> tuple[KernelCost, ...]:
        return tuple(kernel for kernel in self.cost.kernels if not kernel.takes_quantised)

    def _laid_out(self, kernels: tuple[KernelCost, ...]) -> "_LinearKernels | _ExpertKernels":
        layout = _LinearKernels if len(self.cost.measured) == 2 else _ExpertKernels
        return layout(self.cost.tokens, kernels, self._num_sms)


Range = tuple[Any, ...]
"""Of a kernel: its numbers for single values, in the order of TERMS, the place of its tile in
`_tile_rows`, and what `_laid_out` says. Counts are floats: to multiply two floats takes half the
time of a float and an int."""


Slow = list[tuple[int, float, float]]
"""(place in `tokens`, us, us per column of K)"""
_Row = tuple[str, list[Range], list[float], list[Slow], tuple[None, ...]]
"""A kernel: backend, ranges, what `_slow_rows` finds, None for each number of tokens that it does
not take."""


class _Kernels(ABC):
    """What linear layers and experts share.

    us: `_us`, which remembers sizes: layers of one size differ in what is known of their weights.
    """

    def __init__(self, tokens: tuple[int, ...], kernels: tuple[KernelCost, ...], num_sms: int):
        self.error, self.error_beyond = (
            tuple((kernel.backend, _errors(kernel, tokens, name)) for kernel in kernels)
            for name in ("error", "error_beyond")
        )
        self.us = lru_cache(maxsize=256)(self._us)
        self._versions = tuple((kernel.backend, kernel.version) for kernel in kernels)
        self._stale: tuple[Mapping[str, str], Stale] = {}, ()
        self._tokens = tuple(map(float, tokens))
        self._num_sms = float(num_sms)
        self._tile_rows = sorted({one.tile[1] for kernel in kernels for one in kernel.ranges})
        self._rows: list[_Row] = [
            (
                kernel.backend,
                [self._range(one, own) for one, own in _by_range(kernel, tokens)],
                *_slow_rows(kernel, tokens, num_sms),
                (None,) * sum(m > kernel.max_tokens for m in tokens),
            )
            for kernel in kernels
        ]

    def _range(self, one: RangeCost, tokens: tuple[int, ...]) -> Range:
        launch, weights, inputs, outputs, products, waves = one.numbers
        numbers = weights / 1e6, inputs / 1e6, outputs / 1e6, products / 1e9, waves / 1e3
        place = self._tile_rows.index(one.tile[1])
        return (launch, *numbers, place, *self._laid_out(one, tokens))

    @abstractmethod
    def _laid_out(self, one: RangeCost, tokens: tuple[int, ...]) -> tuple[Any, ...]:
        """What a range has besides its numbers and the place of its tile in `_tile_rows`."""

    @abstractmethod
    def _us(self, sizes: Sizes) -> Times:
        """Of every kernel and number of tokens."""

    def stale(self, versions: Mapping[str, str]) -> Stale:
        """As of `Timings`; versions: by backend, what is here: a mapping that does not change."""
        if self._stale[0] is not versions:
            found = tuple(
                (name, version, versions[name])
                for name, version in self._versions
                if name in versions and not is_same(version, versions[name])
            )
            self._stale = versions, found
        return self._stale[1]


class _LinearKernels(_Kernels):
    def _laid_out(self, one: RangeCost, tokens: tuple[int, ...]) -> tuple[Any, ...]:
        """How many tiles of tokens there are, times -1, where that is the same for all, else 0;
        whether a call then takes as long for any; tokens, else with those tiles of each."""
        tiles = [float(-m // one.tile[0]) for m in tokens]
        _, _, *by_token, _ = one.numbers
        if len({*tiles}) == 1:
            return tiles[0], not any(by_token), tuple(map(float, tokens))
        return 0.0, False, tuple(zip(map(float, tokens), tiles))

    def _us(self, sizes: Sizes) -> Times:
        n, k = map(float, sizes)
        size, sms = n * k, self._num_sms
        tiles_of = [float(-(-sizes[0] // rows)) for rows in self._tile_rows]
        found = []
        for backend, ranges, bounds, slow, missing in self._rows:
            us: list[float | None] = []
            for (
                launch, weights, inputs, outputs, products, waves, place, same, is_flat, tokens
            ) in ranges:  # fmt: skip
                base, wave, tiles = launch + weights * size, waves * k, tiles_of[place]
                if is_flat:
                    us += [base - wave * (same * tiles // sms)] * len(tokens)
                    continue
                slope = inputs * k + outputs * n + products * size
                if same:
                    base -= wave * (same * tiles // sms)
                    for m in tokens:
                        us.append(base + slope * m)
                else:
                    for m, num in tokens:
                        us.append(base + slope * m - wave * (num * tiles // sms))
            if bounds:
                for place, time, columns in slow[bisect_left(bounds, n)]:
                    us[place] = time + columns * k
            found.append((backend, (*us, *missing)))
        return tuple(found)


class _ExpertKernels(_Kernels):
    def _laid_out(self, one: RangeCost, tokens: tuple[int, ...]) -> tuple[Any, ...]:
        """Tokens of a tile, and where those of the range begin and end among all."""
        first = self._tokens.index(tokens[0])
        return float(one.tile[0]), first, first + len(tokens)

    def _us(self, sizes: Sizes) -> Times:
        num_experts, inner, hidden, top_k, ranks = map(float, sizes)
        own, rest, pairs = num_experts / ranks, 1 - top_k / num_experts, top_k / ranks
        matrix, sms = 3 * inner * hidden, self._num_sms
        read, written = pairs * (hidden + inner), pairs * (2 * inner + hidden)
        up_tiles, down_tiles = (
            [float(-(-size // rows)) for rows in self._tile_rows]
            for size in (2 * sizes[1], sizes[2])
        )
        # Tokens, the experts that they choose, and the rows of each, times -1.
        routed = []
        for m in self._tokens:
            number = own * (1 - rest**m)
            routed.append((m, number, -pairs * m / number))
        found = []
        for backend, ranges, *_, missing in self._rows:
            us: list[float | None] = []
            for (
                launch, weights, inputs, outputs, products, waves, place, tile, first, end
            ) in ranges:  # fmt: skip
                slope = inputs * read + outputs * written + products * pairs * matrix
                up, down = up_tiles[place], down_tiles[place]
                experts, wide, deep = weights * matrix, waves * hidden, waves * inner
                for m, number, rows in routed[first:end]:
                    tiles = number * (rows // tile)  # times -1
                    us.append(
                        launch + experts * number + slope * m
                        - wide * (tiles * up // sms) - deep * (tiles * down // sms)
                    )  # fmt: skip
            found.append((backend, (*us, *missing)))
        return tuple(found)


def _slow_rows(
    kernel: KernelCost, tokens: Sequence[int], num_sms: int
) -> tuple[list[float], list[Slow]]:
    """Bounds between numbers of rows of a weight, ascending, and by `bisect_left` of those what is
    slow; [] and [] for a kernel that never is."""
    slow = kernel.slow_wave
    if slow is None:
        return [], []
    every = [
        (low, high, (place, slow.launch, slow.columns / 1e3))
        for place, m in enumerate(tokens)
        if m <= kernel.max_tokens
        for low, high in slow.rows(m, num_sms)
    ]
    bounds = sorted({bound for low, high, _ in every for bound in (low, float(high))})
    between = zip([0.0, *bounds], bounds)
    found = [
        [one for low, high, one in every if low <= above and up_to <= high]
        for above, up_to in between
    ]
    return bounds, [*found, []]


def _by_range(
    kernel: KernelCost, tokens: Sequence[int]
) -> Iterator[tuple[RangeCost, tuple[int, ...]]]:
    low = 0
    for one in kernel.ranges:
        high = min(one.max_tokens if one.max_tokens < RANGES[-1] else tokens[-1], kernel.max_tokens)
        if own := tuple(m for m in tokens if low < m <= high):
            yield one, own
        low = one.max_tokens


def _errors(kernel: KernelCost, tokens: Sequence[int], name: str) -> tuple[float, ...]:
    errors = [getattr(one, name) for one, own in _by_range(kernel, tokens) for _ in own]
    return (*errors, *([0.0] * (len(tokens) - len(errors))))
