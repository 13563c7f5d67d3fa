"""`vllm kernels fit`: the numbers of the cost model, from a table of measurements.

For each kernel and range of tokens, least squares of relative errors over the measured sizes, once
for each tile; the tile with the least squares is taken. A number that would be negative is left
out. The error is that of fits that did not have the size they are asked for. Sums in a fixed order
without a library make the result the same on every machine.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, takewhile
from math import inf, sqrt
from pathlib import Path

from vllm.kernels.evidence.cost_model import (
    RANGES,
    TERMS,
    Fitted,
    KernelCost,
    KindCost,
    RangeCost,
    Sizes,
    SlowWave,
    dimensions,
    kind_of,
    terms,
)
from vllm.kernels.evidence.tables import Entry, Table, is_of_attention

# (tokens, rows of a weight), as kernels cut their products.
TILES = (
    (16, 64), (64, 32), (64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 256),
    (256, 128),
)  # fmt: skip
# Of DeepGEMM 0.1.3 on 132 multiprocessors. By the heuristics of its repository (sm90.hpp) it takes
# these tiles where one wave of them serves and none of smaller tiles does; such a wave has no
# multicast. Measured: it takes five times as long as one of 128x128, for all such sizes of our
# tables and for no other. The shares are those that tiles of 128x160 and of 256x112 leave.
SLOW_TILES = {"deep_gemm": ((128, 192, 0.8334), (256, 128, 0.875))}
# Fewer sizes than this say nothing about others.
MIN_SIZES = 2
# Two sizes may be alike: the error is taken to be at least that of kinds with twenty.
_FEW_SIZES, _ERROR_OF_FEW = 3, 0.1
# The error beyond all measured sizes where there are too few to tell, in that between them.
_UNKNOWN_BEYOND = 2.0
_COLLINEAR = 1e-9
_NO_DIFFERENCE = 1e-8  # in mean squares of relative errors: times have four digits
_MOST_OFF = 10.0

Point = tuple[int, float]
"""Tokens and microseconds."""
_Points = Mapping[Sizes, Sequence[Point]]
_Left = frozenset[Sizes]
_NONE: _Left = frozenset()


def fitted_of(path: Path, table: Table, fits: "Mapping[str, KindFit]") -> Fitted:
    """path: the file of `table`. fits: `kinds_of(table)`."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    dates = [entry.date for row in table.rows.values() for entry in row.values()]
    kinds = {kind: one.cost() for kind, one in fits.items()}
    return Fitted(table.chip, table.name, path.name, digest, max(dates, default=""), kinds)


def kinds_of(table: Table) -> "dict[str, KindFit]":
    """Every kind of linear layers and experts with MIN_SIZES sizes or more; without sizes that
    kernels pad."""
    by_kind: dict[str, dict[Sizes, Mapping[str, Entry]]] = {}
    for size_key, row in sorted(table.rows.items()):
        if ", padded to " in size_key or is_of_attention(size_key):
            continue
        kind, sizes = kind_of(size_key)
        by_kind.setdefault(kind, {})[sizes] = row
    num_sms = table.chip.num_sms or 1
    fits = {kind: KindFit(_kernel_fits(rows, num_sms)) for kind, rows in by_kind.items()}
    return {kind: one for kind, one in fits.items() if one.kernels}


@dataclass(frozen=True)
class KindFit:
    """All kernels for one kind of problem."""

    kernels: "tuple[_KernelFit, ...]"

    @cached_property
    def sizes(self) -> tuple[Sizes, ...]:
        return tuple(sorted({sizes for kernel in self.kernels for sizes in kernel.points}))

    def cost(self, left_out: _Left = _NONE) -> KindCost:
        """As if the sizes `left_out` had not been measured."""
        kept = [sizes for sizes in self.sizes if sizes not in left_out]
        tokens = sorted({m for kernel in self.kernels for m in kernel.tokens})
        kernels = (kernel.cost(left_out) for kernel in self.kernels)
        return KindCost(
            tuple(tokens),
            tuple((min(column), max(column)) for column in zip(*map(dimensions, kept))),
            len(kept),
            tuple(kernel for kernel in kernels if kernel is not None),
        )


def _kernel_fits(
    rows: Mapping[Sizes, Mapping[str, Entry]], num_sms: int
) -> "tuple[_KernelFit, ...]":
    found = []
    for backend in sorted({backend for row in rows.values() for backend in row}):
        own = {sizes: row[backend] for sizes, row in sorted(rows.items()) if backend in row}
        version = _version(list(own.values()))
        for name in ("us", "quantised_us"):
            points = {
                sizes: getattr(entry, name)
                for sizes, entry in own.items()
                if entry.version == version and getattr(entry, name)
            }
            kernel = _KernelFit(backend, name == "quantised_us", version, points, num_sms)
            if kernel.ranges:
                found.append(kernel)
    return tuple(found)


def _version(entries: Sequence[Entry]) -> str:
    """That of most rows, the latest of equals: others were measured of other code."""
    counts = Counter(entry.version for entry in entries)
    return max(entries, key=lambda e: (counts[e.version], e.date, e.version)).version


@dataclass(frozen=True)
class _KernelFit:
    backend: str
    takes_quantised: bool
    version: str
    points: _Points
    num_sms: int

    @cached_property
    def ranges(self) -> "tuple[_RangeFit, ...]":
        """From the first on, while there are sizes enough."""
        found = []
        for low, high in pairwise((0, *RANGES)):
            own = {
                sizes: inner
                for sizes, times in self.points.items()
                if (inner := tuple((m, us) for m, us in times if low < m <= high))
            }
            one = _RangeFit(own, high, self.num_sms, self.slow_wave)
            if len(one.kept(_NONE)) < MIN_SIZES:
                break
            found.append(one)
        return tuple(found)

    @cached_property
    def tokens(self) -> set[int]:
        last = self.ranges[-1].max_tokens
        return {m for times in self.points.values() for m, _ in times if m <= last}

    def cost(self, left_out: _Left) -> KernelCost | None:
        """None where nothing is left."""
        ranges = tuple(takewhile(lambda one: one.kept(left_out), self.ranges))
        if not ranges:
            return None
        slow = self.slow_wave(left_out)
        if slow is not None:
            slow = SlowWave(slow.tiles, _rounded(slow.launch), _rounded(slow.columns))
        most = max(m for m in self.tokens if m <= ranges[-1].max_tokens)
        costs = tuple(one.cost(left_out) for one in ranges)
        return KernelCost(self.backend, self.takes_quantised, self.version, most, costs, slow)

    def slow_wave(self, left_out: _Left) -> SlowWave | None:
        """None for a kernel without such tiles, or where none was measured."""
        slow = SlowWave(SLOW_TILES.get(self.backend, ()), 0.0, 0.0)
        sums = _Sums.zero(2)
        for sizes, times in self.points.items() if slow.tiles else ():
            for m, us in times if sizes not in left_out else ():
                if slow.takes(m, sizes[0], self.num_sms):
                    sums.add_row([1 / us, sizes[1] / 1e3 / us])
        return SlowWave(slow.tiles, *sums.solved()) if sums.count else None


# ---------------------------------------------------------------- one range of tokens


@dataclass(frozen=True)
class _Solution:
    tile: tuple[int, int]
    numbers: tuple[float, ...]
    slow: SlowWave | None

    def us(self, sizes: Sizes, num_tokens: int, num_sms: int) -> float:
        if self.slow and self.slow.takes(num_tokens, sizes[0], num_sms):
            return self.slow.launch + self.slow.columns * sizes[1] / 1e3
        values = terms(sizes, num_tokens, self.tile, num_sms)
        return sum(number * value for number, value in zip(self.numbers, values))


@dataclass(frozen=True)
class _RangeFit:
    """points: by sizes, times for the numbers of tokens of the range."""

    points: _Points
    max_tokens: int
    num_sms: int
    slow_wave: Callable[[_Left], SlowWave | None]
    _solutions: dict[_Left, _Solution] = field(default_factory=dict)

    def kept(self, left_out: _Left) -> list[Sizes]:
        """Sizes with times that are no slow wave's."""
        sums = self._sums[TILES[0]]
        return [sizes for sizes in self.points if sizes not in left_out and sums[sizes].count]

    def cost(self, left_out: _Left) -> RangeCost:
        solution = self._solved(left_out)
        numbers = (*solution.numbers, *self._errors(left_out))
        return RangeCost(self.max_tokens, solution.tile, *map(_rounded, numbers))

    def _errors(self, left_out: _Left) -> tuple[float, float]:
        """Between measured sizes, each left out by itself, and beyond them, where those are left
        out that have the least or the most of a dimension."""
        kept = [sizes for sizes in self.points if sizes not in left_out]
        if len(self.kept(left_out)) < MIN_SIZES:
            return self._errors(_NONE)  # nothing is known of a single size
        error = _mean([off for sizes in kept for off in self._off((sizes,), left_out)])
        if len(kept) < _FEW_SIZES:
            error = max(error, _ERROR_OF_FEW)
        groups = _outermost(kept)
        beyond = max((_mean(self._off(group, left_out)) for group in groups), default=0.0)
        return error, max(error, beyond or _UNKNOWN_BEYOND * error)

    def _off(self, asked: Sequence[Sizes], left_out: _Left) -> list[float]:
        """By how much a fit without either is off for the sizes `asked`."""
        solution = self._solved(left_out.union(asked))
        return [
            _off(solution.us(sizes, m, self.num_sms), us)
            for sizes in asked
            for m, us in self.points[sizes]
        ]

    def _solved(self, left_out: _Left) -> _Solution:
        if left_out in self._solutions:
            return self._solutions[left_out]
        best: tuple[float, tuple[int, int], tuple[float, ...]] | None = None
        for tile, sums in self._sums.items():
            total = _Sums.zero()
            total.add(self._totals[tile])
            for sizes in sorted(left_out & sums.keys()):
                total.add(sums[sizes], -1)
            numbers = total.solved()
            squares = total.squares(numbers)
            # Of tiles that make no difference, the first.
            if best is None or squares < best[0] - _NO_DIFFERENCE * total.count:
                best = squares, tile, numbers
        assert best is not None
        solution = _Solution(*best[1:], self.slow_wave(left_out))
        self._solutions[left_out] = solution
        return solution

    @cached_property
    def _totals(self) -> dict[tuple[int, int], "_Sums"]:
        """Of all sizes, by tile."""
        totals = {tile: _Sums.zero() for tile in self._sums}
        for tile, by_sizes in self._sums.items():
            for sums in by_sizes.values():
                totals[tile].add(sums)
        return totals

    @cached_property
    def _sums(self) -> dict[tuple[int, int], dict[Sizes, "_Sums"]]:
        """By tile and sizes, without slow waves."""
        slow = self.slow_wave(_NONE)
        found: dict[tuple[int, int], dict[Sizes, _Sums]] = {tile: {} for tile in TILES}
        for tile, by_sizes in found.items():
            for sizes, times in self.points.items():
                own = by_sizes[sizes] = _Sums.zero()
                for m, us in times:
                    if slow is None or not slow.takes(m, sizes[0], self.num_sms):
                        own.add_row([v / us for v in terms(sizes, m, tile, self.num_sms)])
        return found


def _outermost(every: Sequence[Sizes]) -> list[tuple[Sizes, ...]]:
    """Sizes that have the least of a dimension, and those that have the most, for each dimension
    of which there are more than two."""
    groups = []
    for place, column in enumerate(zip(*every)):
        for limit in (min(column), max(column)) if len(set(column)) > 2 else ():
            groups.append(tuple(sizes for sizes in every if sizes[place] == limit))
    return groups


# ---------------------------------------------------------------- least squares


@dataclass
class _Sums:
    """Of rows A, for the least squares of A x - 1 over x >= 0: products A'A and A'1."""

    products: list[list[float]]
    right: list[float]
    count: int = 0

    @classmethod
    def zero(cls, size: int = len(TERMS)) -> "_Sums":
        return cls([[0.0] * size for _ in range(size)], [0.0] * size)

    def add_row(self, row: Sequence[float]) -> None:
        for own, value in zip(self.products, row):
            for j, other in enumerate(row):
                own[j] += value * other
        self.right = [sum_ + value for sum_, value in zip(self.right, row)]
        self.count += 1

    def add(self, other: "_Sums", sign: int = 1) -> None:
        for own, row in zip(self.products, other.products):
            for j, value in enumerate(row):
                own[j] += sign * value
        self.right = [sum_ + sign * value for sum_, value in zip(self.right, other.right)]
        self.count += sign * other.count

    def squares(self, x: Sequence[float]) -> float:
        """The sum of squared errors."""
        if not any(x):
            return inf
        quadratic = sum(
            xi * xj * value for xi, row in zip(x, self.products) for xj, value in zip(x, row)
        )
        linear = sum(xi * value for xi, value in zip(x, self.right))
        return quadratic - 2 * linear + self.count

    def solved(self) -> tuple[float, ...]:
        """x, where numbers that would be negative are left out, the most negative first."""
        every = range(len(self.right) if self.count else 0)
        scale = [sqrt(self.products[i][i]) for i in every]
        kept = [i for i in every if scale[i]]
        while kept:
            x = self._solved_for(kept, scale)
            worst = min(range(len(kept)), key=x.__getitem__)
            if x[worst] > 0:
                found = dict(zip(kept, x))
                return tuple(found[i] / scale[i] if i in found else 0.0 for i in every)
            del kept[worst]
        return (0.0,) * len(self.right)

    def _solved_for(self, kept: Sequence[int], scale: Sequence[float]) -> list[float]:
        """By elimination; 0 for a term that is a sum of those before it."""
        rows = [
            [*(self.products[i][j] / scale[i] / scale[j] for j in kept), self.right[i] / scale[i]]
            for i in kept
        ]
        free = []
        for p, pivot in enumerate(rows):
            if pivot[p] < _COLLINEAR:
                continue
            free.append(p)
            for other in rows[p + 1 :]:
                factor = other[p] / pivot[p]
                if factor:
                    for j in range(p, len(pivot)):
                        other[j] -= factor * pivot[j]
        x = [0.0] * len(kept)
        for p in reversed(free):
            rest = sum(rows[p][j] * x[j] for j in free if j > p)
            x[p] = (rows[p][-1] - rest) / rows[p][p]
        return x


def _off(estimate: float, us: float) -> float:
    """By how much, whichever is larger; of what is useless a limit."""
    return min(max(estimate / us, us / estimate) - 1, _MOST_OFF) if estimate > 0 else _MOST_OFF


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _rounded(number: float) -> float:
    """More digits would be noise."""
    return float(f"{number:.4g}")
