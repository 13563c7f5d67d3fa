"""What imported tables are worth: kernels compared, with each other, with bf16, with our own."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import exp, log
from statistics import fmean
from typing import NamedTuple

from vllm.kernels.evidence.bf16 import both, same_library
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
from vllm.kernels.evidence.tables import Table, is_of_attention


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
            for other in same_library(one, plain, table.family):
                for size in sorted(one.rows.keys() & other.rows.keys()):
                    for tokens, us, bf16_us in both(kind, one, plain, other, size):
                        num_compared += 1
                        if us > bf16_us:
                            found.append(
                                Slower(table.family, kind.format, one.measured_by, one.name,
                                       kind.routing, parse_size(size), tokens, us, bf16_us)
                            )  # fmt: skip
    return sorted(found, key=lambda slow: (-slow.ratio, slow)), num_compared


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
