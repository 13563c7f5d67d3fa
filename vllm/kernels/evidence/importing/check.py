"""What imported tables are worth: kernels compared, sizes left out, bf16 faster than FP8."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations
from math import exp, log
from statistics import fmean
from typing import NamedTuple

from vllm.kernels.evidence.imported import (
    BALANCED,
    BANDS,
    ImportedTable,
    Kind,
    Series,
    Size,
    band_of,
    parse_size,
    parse_times,
    size_text,
)
from vllm.kernels.evidence.splits import Timings
from vllm.kernels.evidence.tables import Table, is_of_attention
from vllm.kernels.select.decision import Parts

# Where the README of the measurements splits all sizes alike.
ONE_SPLIT = 1024


class Compared(NamedTuple):
    """A kernel against the fastest of each size and token count that several measured. ratios:
    geometric mean by band, None where it has none there. num_shapes: sizes and token counts."""

    measured_by: str
    label: str
    name: str
    ratios: tuple[float | None, ...]
    num_shapes: int


def compared(kinds: Iterable[Kind]) -> list[Compared]:
    """Every kernel of the kinds, ranked or not, those with most shapes first."""
    logs: dict[tuple[str, str, str], list[list[float]]] = defaultdict(lambda: [[] for _ in BANDS])
    for kind in kinds:
        for tokens, times in _shapes(kind):
            best = min(us for _, us in times)
            for one, us in times:
                key = one.measured_by, one.label, one.name
                logs[key][band_of(tokens)].append(log(us / best))
    return sorted(_all_compared(logs), key=lambda one: (-one.num_shapes, one[:3]))


def _all_compared(logs: Mapping[tuple[str, str, str], list[list[float]]]) -> list[Compared]:
    return [
        Compared(*key, tuple(map(_geomean, bands)), sum(map(len, bands)))
        for key, bands in logs.items()
    ]


def num_shapes(kinds: Iterable[Kind]) -> int:
    """Sizes with a token count that several kernels were measured for."""
    return sum(1 for kind in kinds for _ in _shapes(kind))


def _shapes(kind: Kind) -> Iterator[tuple[int, list[tuple[Series, float]]]]:
    sizes = sorted({size for one in kind.series for size in one.rows})
    for size in sizes:
        rows = [(one, parse_times(one.rows[size])) for one in kind.series if size in one.rows]
        for i, tokens in enumerate(kind.tokens):
            times = [(one, us) for one, row in rows if (us := row[i])]
            if len(times) > 1:
                yield tokens, times


def _geomean(logs: Sequence[float]) -> float | None:
    return exp(fmean(logs)) if logs else None


# ---------------------------------------------------------------- sizes left out


class HeldOut(NamedTuple):
    """What choosing by near sizes costs. mean, worst: time of the chosen kernel over the fastest's.
    num_sizes: those asked, num_unknown: those of them with nothing near."""

    how: str
    mean: float
    worst: float
    num_sizes: int
    num_unknown: int = 0


def held_out(kind: Kind) -> list[HeldOut]:
    """Over the sizes with a time of every backend, where there are several: the split that the
    selector makes of the estimate, with whole models left out and with single sizes left out; for
    comparison one choice for all, and the best single split. [] where there is no choice."""
    if len(kind.by_backend) < 2 or not kind.complete_sizes():
        return []
    found = [_choosing(kind, "single sizes left out", _is_same)]
    if len(kind.complete_sizes()[0]) > 2:
        found.insert(0, _choosing(kind, "whole models left out", is_cut))
    names = list(kind.by_backend)
    found += [_fixed(kind, f"always {name}", ((None, name),)) for name in names]
    splits = (
        _fixed(
            kind,
            f"{few} up to {ONE_SPLIT} tokens, then {many}",
            ((ONE_SPLIT, few), (None, many)),
        )
        for few, many in permutations(names, 2)
    )
    return [*found, min(splits, key=lambda one: one.mean)]


def _is_same(a: Size, b: Size) -> bool:
    return a == b


def is_cut(a: Size, b: Size) -> bool:
    """Whether two sizes of experts may be ranks' shares of one model."""
    return len(a) > 2 and (a[0], *a[2:4]) == (b[0], *b[2:4]) and _is_power_of_two(a[1], b[1])


def _is_power_of_two(a: int, b: int) -> bool:
    ratio, rest = divmod(max(a, b), min(a, b))
    return not rest and not ratio & (ratio - 1)


def _choosing(kind: Kind, how: str, is_left_out: Callable[[Size, Size], bool]) -> HeldOut:
    able = tuple((name, None) for name in kind.by_backend)
    logs: list[float] = []
    num_unknown = 0
    for size in kind.complete_sizes():
        estimate = kind.at(size, skip=partial(is_left_out, size))
        if estimate is None:
            num_unknown += 1
            continue
        timings = Timings("", estimate.tokens, estimate.us)
        logs += _costs(kind, size, timings.best_split(able, (1, kind.tokens[-1])))
    return _held_out(kind, how, logs, num_unknown)


def _fixed(kind: Kind, how: str, parts: Parts) -> HeldOut:
    logs = [cost for size in kind.complete_sizes() for cost in _costs(kind, size, parts)]
    return _held_out(kind, how, logs, 0)


def _held_out(kind: Kind, how: str, logs: Sequence[float], num_unknown: int) -> HeldOut:
    mean, worst = exp(fmean(logs or [0.0])), exp(max(logs, default=0.0))
    return HeldOut(how, mean, worst, len(kind.complete_sizes()), num_unknown)


def _costs(kind: Kind, size: Size, parts: Parts) -> Iterator[float]:
    """log(chosen / fastest) for each token count that every backend was measured for."""
    measured = kind.at(size)
    assert measured is not None
    us = dict(measured.us)
    for i, tokens in enumerate(measured.tokens):
        known = {name: time for name, own in us.items() if (time := own[i]) is not None}
        if len(known) == len(us):
            chosen = next(name for limit, name in parts if limit is None or tokens <= limit)
            yield log(known[chosen] / min(known.values()))


# ---------------------------------------------------------------- bf16 before FP8


class Slower(NamedTuple):
    """A quantised layer that took longer than the same in bf16, both by one framework; of experts
    also by one library. ratio: us over bf16_us."""

    family: str
    format: str
    measured_by: str
    name: str
    routing: str
    size: Size
    tokens: int
    us: float
    bf16_us: float

    @property
    def ratio(self) -> float:
        return self.us / self.bf16_us


def slower_than_bf16(table: ImportedTable) -> tuple[list[Slower], int]:
    """All of them, the worst first, and of how many that were compared. Series with a fault are
    left out."""
    found, num_compared = [], 0
    for kind in table.kinds:
        plain = table.kind("bf16", kind.activation, kind.routing)
        if plain is None or kind is plain:
            continue
        for one in (one for one in kind.series if not one.fault):
            for other in _same_library(one, plain, table.family):
                for size, tokens, us, bf16_us in _both(kind, one, plain, other):
                    num_compared += 1
                    if us > bf16_us:
                        found.append(
                            Slower(table.family, kind.format, one.measured_by, one.name,
                                   kind.routing, size, tokens, us, bf16_us)
                        )  # fmt: skip
    return sorted(found, key=lambda slow: (-slow.ratio, slow)), num_compared


def _same_library(one: Series, plain: Kind, family: str) -> Iterator[Series]:
    for other in plain.series:
        is_same = family == "linear" or other.name == one.name
        if other.measured_by == one.measured_by and is_same and not other.fault:
            yield other


def _both(
    kind: Kind, one: Series, plain: Kind, other: Series
) -> Iterator[tuple[Size, int, float, float]]:
    for size in sorted(one.rows.keys() & other.rows.keys()):
        times = dict(zip(plain.tokens, parse_times(other.rows[size])))
        for tokens, us in zip(kind.tokens, parse_times(one.rows[size])):
            bf16_us = times.get(tokens)
            if us and bf16_us:
                yield parse_size(size), tokens, us, bf16_us


# ---------------------------------------------------------------- against our own


def against_ours(table: ImportedTable, ours: Table) -> list[Compared]:
    """Our times over those of the same sizes by others: of the same library's kernels, and of
    peers that are written in the same language."""
    logs: dict[tuple[str, str, str], list[list[float]]] = defaultdict(lambda: [[] for _ in BANDS])
    for size_key, row in ours.rows.items():
        found = _measured_elsewhere(table, size_key)
        if found is None:
            continue
        kind, size = found
        for one in kind.series:
            theirs = dict(zip(kind.tokens, parse_times(one.rows.get(size_text(size), ""))))
            for backend, entry in row.items():
                peer = "" if one.backend else one.name.partition("-")[2]
                if backend not in (one.backend, peer) or one.fault:
                    continue
                for tokens, us in entry.us:
                    if isinstance(tokens, int) and (other := theirs.get(tokens)):
                        key = one.measured_by, one.label, f"{backend} / {one.name}"
                        logs[key][band_of(tokens)].append(log(us / other))
    return sorted(_all_compared(logs))


def _measured_elsewhere(table: ImportedTable, size_key: str) -> tuple[Kind, Size] | None:
    """The kind and size of a row of ours; see `LinearProblem.size_key`. None for partial blocks
    and attention, which others do not time."""
    weight, _, rest = size_key.partition(":")
    sizes, _, others = rest.partition(" ")
    if "padded" in others or is_of_attention(size_key):
        return None
    numbers = parse_size(sizes)
    is_linear = len(numbers) == 2
    if is_linear != (table.family == "linear"):
        return None
    key = weight.partition("[")[0]
    kind = table.kind(key) if is_linear else table.kind(key, "silu", BALANCED)
    if kind is None:
        return None
    if is_linear:
        return kind, numbers
    num_experts, *ranks, intermediate, hidden, top_k = numbers
    return kind, (hidden, intermediate, top_k, num_experts, *(ranks or [1]))
