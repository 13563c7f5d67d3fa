"""Kernel times that others measured on chips we do not have: what they say of one problem.

The tables in `imported/` are derived by `vllm kernels import` (evidence/importing/). A kernel that
is the same library's as a backend's of ours is filed under that backend; other implementations are
peers: they show what is possible on the chip and rank nothing. Standard library only.
"""

import json
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from heapq import nsmallest
from math import exp, hypot, log, log2
from operator import sub
from pathlib import Path
from typing import Any, NamedTuple

from vllm.errors import ConfigError
from vllm.kernels.evidence.tables import Chip, read_whole, user_folder
from vllm.kernels.select.problem import LinearProblem, WeightProblem
from vllm.machine import Device
from vllm.utils.dataclasses import dataclass, replace

SHIPPED = Path(__file__).parent / "imported"
FOLDER = "imported"
_CHECK = "_check"
_FORMATS_FILE = SHIPPED.parent / "imported_formats.json"

# Errors are stored for token counts up to each of these.
BANDS = (4, 32, 128, 1024, 16384)
BALANCED, SKEWED = "balanced", "power_law_1.2"
# How many sizes an estimate is made from, and how far the nearest may be: octaves, summed over
# what a size consists of (`features`).
NUM_NEAR = 4
MAX_DISTANCE = 3.0

_GZIP = 16 + zlib.MAX_WBITS
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError)

Size = tuple[int, ...]
"""(n, k) of a linear layer; (hidden, intermediate per rank, top_k, experts, expert ranks)."""
ByName = tuple[tuple[str, tuple[float | None, ...]], ...]


@lru_cache(maxsize=1)
def formats() -> dict[str, tuple[str, list[str]]]:
    """By the text of a WeightFormat: the format's name in the tables, and the activation schemes of
    which the problem must allow one."""
    found: dict[str, tuple[str, list[str]]] = json.loads(_FORMATS_FILE.read_text())
    return found


class Lead(NamedTuple):
    """The fastest backend for `tokens`. lead: how much longer the next takes, as a ratio minus 1;
    None where no other was measured. is_clear: whether that is more than the error."""

    tokens: int
    backend: str
    lead: float | None
    is_clear: bool


@dataclass(frozen=True)
class ImportedTimes:
    """Times of one problem. us: by backend, microseconds of the whole layer as a framework ran it,
    quantising included, for each entry of `tokens`; None where unknown. peers: the same of other
    implementations. error: by entry of `tokens`, the ratio minus 1 below which two backends cannot
    be told apart. distance: of the nearest size measured, in octaves; 0 where it is this one.
    sizes: those that the times come from.
    """

    source: str
    tokens: tuple[int, ...]
    us: ByName
    peers: ByName
    error: tuple[float, ...]
    distance: float
    sizes: tuple[str, ...]

    def leads(self) -> tuple[Lead, ...]:
        """For each token count for which a backend has a time."""
        found = []
        for i, (tokens, error) in enumerate(zip(self.tokens, self.error)):
            times = sorted((time, name) for name, us in self.us if (time := us[i]) is not None)
            if times:
                (best, backend), *others = times
                lead = others[0][0] / best - 1 if others else None
                found.append(Lead(tokens, backend, lead, lead is not None and lead > error))
        return tuple(found)


def first_times(
    tables: Iterable["ImportedTable"],
    problem: WeightProblem,
    routing: str = BALANCED,
) -> ImportedTimes | None:
    """Of the first table that says something of the problem: that has a near size of its format
    with a kernel that a backend here calls too. routing: of tokens to experts, BALANCED or SKEWED.
    """
    return next(filter(None, (table.times(problem, routing) for table in tables)), None)


def comparing(tables: Iterable["ImportedTable"]) -> Iterator["ImportedTable"]:
    """With those kinds of layers alone for which two kernels compare that backends here call."""
    for table in tables:
        kinds = tuple(kind for kind in table.kinds if len(kind.by_backend) > 1)
        if kinds:
            yield replace(table, kinds=kinds)


# ---------------------------------------------------------------- one kind of layer


@dataclass(frozen=True)
class Series:
    """One kernel as one framework ran it. backend: ours that calls the same library's kernel, ""
    for a peer. fault: what more or less than the layer its times hold, "" for nothing. rows: by
    size, the text of microseconds for each token count."""

    measured_by: str
    label: str
    name: str
    backend: str
    fault: str
    rows: Mapping[str, str]

    @property
    def framework(self) -> str:
        return self.measured_by.partition(" ")[0]


@dataclass(frozen=True)
class Kind:
    """All series of one format; of experts also of one activation function and routing.

    error: by band, how far frameworks disagree on the same kernel. interpolation: by band, the
    error of an estimate from near sizes; () before it is known.
    """

    format: str
    activation: str
    routing: str
    tokens: tuple[int, ...]
    series: tuple[Series, ...]
    error: tuple[float, ...] = ()
    interpolation: tuple[float, ...] = ()

    @cached_property
    def by_backend(self) -> dict[str, dict[str, str]]:
        """Of each backend the rows of the framework that measured most sizes, others' where it has
        none: rows of one framework compare cleanly."""
        found: dict[str, dict[str, str]] = {}
        for one in self.series:  # the one with most rows first
            if one.backend:
                found[one.backend] = {**one.rows, **found.get(one.backend, {})}
        return found

    @cached_property
    def peers(self) -> dict[str, Mapping[str, str]]:
        return {one.name: one.rows for one in self.series if not one.backend}

    @cached_property
    def _places(self) -> tuple[list["_Place"], list["_Place"]]:
        """Sizes measured of every backend, and of any."""
        every = [set(rows) for rows in self.by_backend.values()]
        if not every:
            return [], []
        places = {text: _Place.of(text) for text in sorted(set.union(*every))}
        complete = set.intersection(*every)
        return [p for text, p in places.items() if text in complete], list(places.values())

    def complete_sizes(self) -> list[Size]:
        """Those measured of every backend."""
        return [place.size for place in self._places[0]]

    def near(self, size: Size, skip: Callable[[Size], bool] | None = None) -> "list[_Near]":
        """At most NUM_NEAR sizes, the nearest first, of those measured of every backend if there
        are any; `size` itself alone if it is one of them. skip: sizes that do not count."""
        at, weights = features(size), num_weights(size)
        for places in self._places:
            found = [
                (_distance(place.features, at), place.size, place)
                for place in places
                if not (skip and skip(place.size))
            ]
            nearest = nsmallest(NUM_NEAR, found)
            if not nearest or nearest[0][0] > MAX_DISTANCE:
                continue
            if nearest[0][0] == 0:
                return [_Near(nearest[0][2].text, 0.0, 1.0, 1.0)]
            return [
                _Near(place.text, d, (weights / num_weights(place.size)) ** 0.5, _pull(d))
                for d, _, place in nearest
            ]
        return []

    def at(self, size: Size, skip: Callable[[Size], bool] | None = None) -> ImportedTimes | None:
        """Times of `size`, measured or estimated; see `near`. None where nothing is near."""
        near = self.near(size, skip)
        if not near:
            return None
        ranked = _estimates(self.by_backend, near, is_joint=True)
        known = [i for i in range(len(self.tokens)) if any(us[i] is not None for _, us in ranked)]
        peers = _estimates(self.peers, near, is_joint=False)
        tokens = tuple(self.tokens[i] for i in known)
        return ImportedTimes(
            self._source,
            tokens,
            _columns(ranked, known),
            _columns((p for p in peers if any(p[1])), known),
            tuple(self._error(m, near[0].distance > 0) for m in tokens),
            near[0].distance,
            tuple(one.text for one in near),
        )

    @cached_property
    def _source(self) -> str:
        by = dict.fromkeys(
            f"{one.backend} by {one.measured_by}" for one in self.series if one.backend
        )
        return ", ".join(by)

    def _error(self, tokens: int, is_estimate: bool) -> float:
        band = band_of(tokens)
        own = self.error[band] if self.error else 0.0
        return hypot(own, self.interpolation[band]) if is_estimate and self.interpolation else own


class _Place(NamedTuple):
    text: str
    size: Size
    features: tuple[float, ...]

    @classmethod
    def of(cls, text: str) -> "_Place":
        size = parse_size(text)
        return cls(text, size, features(size))


class _Near(NamedTuple):
    """scale: what a time of that size is multiplied with: the root of the weights' ratio, between
    a kernel bound by launches and one bound by its weights. pull: its share in an estimate."""

    text: str
    distance: float
    scale: float
    pull: float


def _pull(distance: float) -> float:
    return 1 / (distance + 0.25) ** 2


def _estimates(
    rows: Mapping[str, Mapping[str, str]], near: Sequence[_Near], is_joint: bool
) -> list[tuple[str, list[float | None]]]:
    """By name, a time for each token count: geometric mean of the near sizes. is_joint: of those
    alone that have a time of every name, where there are such, so that names compare."""
    times = {
        name: [parse_times(own.get(one.text, "")) for one in near] for name, own in rows.items()
    }
    num_columns = max((len(row) for own in times.values() for row in own), default=0)
    found: list[tuple[str, list[float | None]]] = [(name, []) for name in rows]
    for i in range(num_columns):
        every = {name: [_entry(row, i) for row in own] for name, own in times.items()}
        joint = [j for j in range(len(near)) if all(own[j] is not None for own in every.values())]
        used = joint if is_joint and joint else range(len(near))
        for name, column in found:
            column.append(_mean([(near[j], us) for j in used if (us := every[name][j])]))
    return found


def _entry(row: Sequence[float | None], column: int) -> float | None:
    return row[column] if column < len(row) else None


def _mean(known: Sequence[tuple[_Near, float]]) -> float | None:
    if not known:
        return None
    if known[0][0].distance == 0:
        return known[0][1]
    total = sum(one.pull for one, _ in known)
    mean = sum(one.pull * log(us * one.scale) for one, us in known) / total
    return float(f"{exp(mean):.4g}")


def _columns(named: Iterable[tuple[str, list[float | None]]], columns: Sequence[int]) -> ByName:
    return tuple((name, tuple(_entry(us, i) for i in columns)) for name, us in named)


# ---------------------------------------------------------------- sizes and times as texts


def features(size: Size) -> tuple[float, ...]:
    """What two sizes are compared by, each the logarithm of base 2: n and k; of experts hidden,
    intermediate per rank, experts per rank, and the share of the experts that a token has."""
    if len(size) == 2:
        return log2(size[0]), log2(size[1])
    hidden, intermediate, top_k, num_experts, ranks = size
    return log2(hidden), log2(intermediate), log2(num_experts / ranks), log2(top_k / num_experts)


def num_weights(size: Size) -> float:
    """Of a rank, in units of one matrix of an expert."""
    return size[0] * size[1] * (size[3] / size[4] if len(size) > 2 else 1)


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    distance: float = sum(map(abs, map(sub, a, b)))
    return distance


def size_text(size: Size) -> str:
    """`4096x7168`; `4096x1536x8x128/4` for experts over 4 ranks."""
    if len(size) == 2:
        return "x".join(map(str, size))
    return "x".join(map(str, size[:4])) + f"/{size[4]}"


def parse_size(text: str) -> Size:
    return tuple(int(part) for part in text.replace("/", "x").split("x"))


def times_text(times: Iterable[float | None]) -> str:
    """Microseconds with three digits, `-` where there is none: `7.12 7.3 - 1180`."""
    return " ".join("-" if us is None else _three_digits(us) for us in times)


def _three_digits(us: float) -> str:
    return f"{us:.3g}" if us < 999.5 else str(int(float(f"{us:.3g}")))


@lru_cache(maxsize=4096)
def parse_times(text: str) -> tuple[float | None, ...]:
    return tuple(None if item == "-" else float(item) for item in text.split())


def band_of(tokens: int) -> int:
    """Its place in BANDS; more tokens than the last belong to the last."""
    return min(bisect_left(BANDS, tokens), len(BANDS) - 1)


# ---------------------------------------------------------------- tables


@dataclass(frozen=True)
class ImportedTable:
    """The series of one chip and problem family. name: of the chip. ranks: whether choices may
    follow it; not where we measure ourselves. derived: when, and by which command."""

    chip: Chip
    name: str
    family: str
    ranks: bool
    project: str
    commit: str
    licence: str
    derived: str
    kinds: tuple[Kind, ...]
    is_near: bool = False

    def kind(self, weight_format: str, activation: str = "", routing: str = "") -> Kind | None:
        asked = weight_format, activation, routing
        return next((k for k in self.kinds if (k.format, k.activation, k.routing) == asked), None)

    def times(self, problem: WeightProblem, routing: str = BALANCED) -> ImportedTimes | None:
        """See `first_times`."""
        asked = place_in_tables(problem, routing)
        kind = self.kind(*asked[0]) if asked else None
        times = kind.at(asked[1]) if asked and kind else None
        if times is None:
            return None
        where = f"{self.name}{', another chip' if self.is_near else ''}"
        nearest = "" if not times.distance else f", estimated from {', '.join(times.sizes)}"
        source = f"{self.project} {self.commit[:7]} ({where}; {times.source}{nearest})"
        return replace(times, source=source)


def place_in_tables(
    problem: WeightProblem, routing: str
) -> tuple[tuple[str, str, str], Size] | None:
    """The kind's key and the size; None for a problem that others did not measure."""
    known = formats().get(str(problem.weight))
    if known is None or problem.dtype != "bf16" or set(problem.act).isdisjoint(known[1]):
        return None
    if problem.block_fit(takes_any_block=False) is not None:
        return None
    if isinstance(problem, LinearProblem):
        return (known[0], "", ""), (problem.n, problem.k)
    if problem.layout != "standard":
        return None
    size = problem.hidden, problem.intermediate, problem.top_k, problem.num_experts
    return (known[0], problem.activation, routing), (*size, problem.cut_experts)


def file_name(chip: Chip, family: str, ranks: bool) -> str:
    """The name says which tables choices may follow, so that the others are not read for that."""
    return f"{chip.file_name.removesuffix('.json')}_{family}{'' if ranks else _CHECK}.json.gz"


def find_imported(
    chip: Chip, family: str, alone_ranking: bool = False
) -> tuple[ImportedTable, ...]:
    """Of this chip, the user's first, then of the same chip with other memory. alone_ranking:
    those that choices may follow."""
    paths = [
        path
        for folder in (user_folder() / FOLDER, SHIPPED)
        for suffix in ("", *([] if alone_ranking else [_CHECK]))
        for path in sorted(folder.glob(f"{chip.device.arch}_*{family}{suffix}.json.gz"))
    ]
    found = read_whole(paths, read_imported)
    every = [table for table in found if table.ranks or not alone_ranking]
    any_memory = replace(chip, memory_gb_per_s=0)
    own = [table for table in every if table.chip.is_like(chip)]
    near = [table for table in every if table not in own and table.chip.is_like(any_memory)]
    return (*own, *(replace(table, is_near=True) for table in near))


@lru_cache(maxsize=32)
def read_imported(path: Path) -> ImportedTable:
    """ConfigError names the file and what is wrong with it."""
    try:
        return parse_table(json.loads(zlib.decompress(path.read_bytes(), _GZIP)))
    except (OSError, zlib.error, *_MALFORMED) as error:
        raise ConfigError(
            f"{path} is no table of imported kernel times ({type(error).__name__}: {error}): "
            f"delete it and run vllm kernels import again"
        ) from error


def parse_table(content: Mapping[str, Any]) -> ImportedTable:
    memory = int(content["memory_gb_per_s"])
    source = content["source"]
    return ImportedTable(
        Chip(Device.parse(content["device"]), content["num_sms"], memory),
        str(content["name"]),
        str(content["family"]),
        bool(content["ranks"]),
        str(source["project"]),
        str(source["commit"]),
        str(source["licence"]),
        f"{content['derived']['date']} by {content['derived']['command']}",
        tuple(map(parse_kind, content["kinds"])),
    )


def parse_kind(content: Mapping[str, Any]) -> Kind:
    return Kind(
        content["format"],
        content["activation"],
        content["routing"],
        tuple(content["tokens"]),
        tuple(map(_parse_series, content["kernels"])),
        tuple(content.get("error", ())),
        tuple(content.get("interpolation", ())),
    )


def _parse_series(content: Mapping[str, Any]) -> Series:
    names = ("measured_by", "label", "name", "backend", "fault")
    measured_by, label, name, backend, fault = (str(content[key]) for key in names)
    return Series(measured_by, label, name, backend, fault, content["us"])
