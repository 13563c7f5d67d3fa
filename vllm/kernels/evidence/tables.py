"""Tables of measured kernels: a file for each chip, a row for each size, format and type.

This build ships some in `tuned/`; `vllm kernels tune` writes a user's own to
`VLLM_CACHE_ROOT/kernel_tables/`, whose rows come before those of the build. A file is its own
checkpoint: it is rewritten whole after every kernel that was measured.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial, reduce
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vllm import envs
from vllm.errors import ConfigError
from vllm.kernels.evidence.splits import Timings
from vllm.kernels.evidence.steps import Step
from vllm.kernels.evidence.versions import is_same
from vllm.kernels.select.decision import ByBackend
from vllm.kernels.select.grade import Grade
from vllm.kernels.select.problem import AttentionProblem, Measurable, MoEProblem, Problem
from vllm.machine import Device
from vllm.utils.dataclasses import asdict, dataclass, field, replace
from vllm.utils.files import set_aside, write_atomically

_T = TypeVar("_T")

SHIPPED = Path(__file__).parent / "tuned"

# Two bandwidths within this share of each other are one memory at two settings of its clock.
_SAME_MEMORY = 0.05

# Numbers of tokens that are measured: sizes of captured graphs (worker/cuda_graph.py), and steps
# of prompts above.
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
# On GPUs torch computes every expert for every token, and its attention makes the host wait, so
# that no CUDA graph can hold it: nobody waits for either where there is another.
NEVER_MEASURED = {("cuda", "moe"): ("torch",), ("cuda", "attention"): ("torch",)}


@dataclass(frozen=True)
class Chip:
    """What a measurement holds for. num_sms: of a GPU its multiprocessors, of a CPU its cores; None
    for any number. memory_gb_per_s: the most that a GPU's memory delivers, width of its bus times
    clock, which tells an H100 from an H200; 0 where it is not known."""

    device: Device
    num_sms: int | None = None
    memory_gb_per_s: int = 0

    def is_like(self, other: "Chip") -> bool:
        """Whether what was measured on one holds for the other."""
        ours, theirs = self.device, other.device
        if ours.arch != theirs.arch or (ours.isa and theirs.isa and ours.isa != theirs.isa):
            return False
        if None not in (self.num_sms, other.num_sms) and self.num_sms != other.num_sms:
            return False
        slow, fast = sorted((self.memory_gb_per_s, other.memory_gb_per_s))
        return not slow or fast - slow <= _SAME_MEMORY * fast

    @property
    def file_name(self) -> str:
        """`sm_90_132_3352.json`, `cpu-avx2_8.json`"""
        name = "-".join(filter(None, (self.device.arch, self.device.isa)))
        numbers = (self.num_sms, self.memory_gb_per_s or None)
        return "_".join((name, *(str(n) for n in numbers if n is not None))) + ".json"

    def __str__(self) -> str:
        facts = [str(self.device)]
        if self.num_sms is not None:
            facts.append(f"{self.num_sms} {'SMs' if self.device.kind == 'cuda' else 'cores'}")
        if self.memory_gb_per_s:
            facts.append(f"{self.memory_gb_per_s} GB/s")
        return ", ".join(facts)


Column = int | str
"""What a time is filed under: a number of tokens, or the name of a step of attention."""
Times = tuple[tuple[Column, float], ...]
"""(column, microseconds of a call), ascending."""


def in_order(columns: Iterable[Column]) -> list[Column]:
    """Ascending in tokens, and in keys where steps have as many."""
    return sorted(columns, key=lambda c: (c, 0) if isinstance(c, int) else Step.parse(c).place)


def times_of(by_column: Mapping[Column, float]) -> Times:
    return tuple((column, by_column[column]) for column in in_order(by_column))


def column_text(column: Column) -> str:
    """`M = 16`, or the name of a step."""
    return f"M = {column}" if isinstance(column, int) else column


@dataclass(frozen=True)
class Entry:
    """One backend measured for one row. version: of the libraries it is made of.

    us: quantising activations included, of attention without writing the cache. quantised_us: for
    activations that are quantised already, () for a kernel that does not take such; it counts where
    it is known and what is before the layer quantises in the pass it makes anyway
    (`comes_quantised`). skewed_us and skewed_quantised_us: of experts the same for tokens that
    choose them by a power law; () where that was not measured. noise: relative half-width of the
    95 % interval of the median, the widest of a token count's times. error: the largest against the
    reference, None where it is not known.
    """

    version: str
    date: str
    us: Times
    quantised_us: Times = ()
    skewed_us: Times = ()
    skewed_quantised_us: Times = ()
    noise: Times = ()
    error: float | None = None

    def updated(self, newer: "Entry") -> "Entry":
        """With what `newer` has measured since."""
        kept: dict[str, Any] = {
            name: times_of({**dict(getattr(self, name)), **dict(getattr(newer, name))})
            for name in _BY_TOKENS
        }
        return replace(newer, **kept)

    def cells(self, takes_quantised: bool) -> "dict[Column, Cell]":
        """By column; takes_quantised: whether what is before quantises for it."""
        us, skewed, noise = dict(self.us), dict(self.skewed_us), dict(self.noise)
        if takes_quantised:
            us |= dict(self.quantised_us)
            skewed |= dict(self.skewed_quantised_us)
        return {m: Cell(time, skewed.get(m), noise.get(m, 0.0)) for m, time in us.items()}


_BY_TOKENS = ("us", "quantised_us", "skewed_us", "skewed_quantised_us", "noise")


class Cell(NamedTuple):
    """Of one kernel for one column: microseconds, evenly routed and skewed."""

    us: float
    skewed_us: float | None
    noise: float


@dataclass(frozen=True)
class Row:
    """What tables say of one problem. cells: by backend, by column."""

    source: str
    cells: Mapping[str, Mapping[Column, Cell]]
    stale: tuple[tuple[str, str, str], ...]
    is_near: bool

    @property
    def columns(self) -> set[Column]:
        return {m for own in self.cells.values() for m in own}

    def timings(self) -> Timings:
        """Of a token count that every kernel was also timed for with skewed routing, the mean of
        both times: real routing lies between. Else the time of even routing."""
        cells, tokens = self.cells, in_order(self.columns)
        own = {m: [kernel[m] for kernel in cells.values() if m in kernel] for m in tokens}
        is_mean = {m: all(cell.skewed_us is not None for cell in own[m]) for m in tokens}

        def time(m: Column, cell: Cell) -> float:
            both = [cell.us] if cell.skewed_us is None else [cell.us, cell.skewed_us]
            return sum(both) / len(both) if is_mean[m] else cell.us

        def columns(of: Callable[[Column, Cell], float]) -> ByBackend:
            return tuple(
                (name, tuple(of(m, kernel[m]) if m in kernel else None for m in tokens))
                for name, kernel in cells.items()
            )

        is_noisy = any(cell.noise for column in own.values() for cell in column)
        noise = columns(lambda m, cell: cell.noise) if is_noisy else ()
        us = columns(time)
        grade = Grade.ESTIMATED if self.is_near else Grade.MEASURED
        steps = tuple(m for m in tokens if isinstance(m, str))
        counts = tuple(m if isinstance(m, int) else Step.parse(m).num_tokens for m in tokens)
        return Timings(self.source, counts, us, self.stale, grade, (), noise, steps)


@dataclass(frozen=True)
class Table:
    """What was measured on one kind of chip. name: the chip as its vendor calls it. rows: by
    `size_key` of a problem, by backend. is_near: the chip is another than the one asked about."""

    chip: Chip
    name: str
    rows: Mapping[str, Mapping[str, Entry]] = field(default_factory=dict)
    source: str = ""
    is_near: bool = False

    @property
    def is_shipped(self) -> bool:
        """With this build."""
        return self.source.startswith(f"{SHIPPED.name}/")

    def timings(
        self, problem: Problem, versions: Mapping[str, str] | None = None
    ) -> Timings | None:
        """What it says of `problem`; None where nobody measured that. versions: by backend, what is
        here."""
        row = self.row(problem, versions)
        return None if row is None else row.timings()

    def row(self, problem: Problem, versions: Mapping[str, str] | None) -> Row | None:
        if not isinstance(problem, Measurable) or not is_measurable(problem):
            return None
        row = self.rows.get(problem.size_key)
        if not row:
            return None
        cells = {name: entry.cells(problem.comes_quantised) for name, entry in row.items()}
        date = max(entry.date for entry in row.values())
        stale = tuple(
            (name, entry.version, versions[name])
            for name, entry in row.items()
            if versions and name in versions and not is_same(entry.version, versions[name])
        )
        others = "; another chip" if self.is_near else ""
        if stale:
            others += f"; {', '.join(name for name, *_ in stale)} in another version"
        source = f"{self.source} ({self.name}, {date}{others})"
        return Row(source, cells, stale, self.is_near)

    def entry(self, size_key: str, backend: str, version: str) -> Entry | None:
        """What was measured of this version of the backend."""
        known = self.rows.get(size_key, {}).get(backend)
        return known if known is not None and known.version == version else None

    def with_entry(self, size_key: str, backend: str, entry: Entry) -> "Table":
        row = {**self.rows.get(size_key, {}), backend: entry}
        return replace(self, rows={**self.rows, size_key: row})


def is_measurable(problem: Measurable) -> bool:
    """Whether `size_key` says everything that a kernel's speed depends on: it says nothing of how
    many rows of each expert's block a batched layout fills."""
    return not isinstance(problem, MoEProblem) or problem.layout == "standard"


def timings_of(
    tables: Sequence[Table], problem: Problem, versions: Mapping[str, str] | None = None
) -> Timings | None:
    """The first row that was measured on this chip with what is here, else the first of this chip,
    else the first: an estimate that says so, since the default order is not even that.

    Later rows of the same standing and chip fill it up: who measures one kernel, or a few token
    counts, does not lose what this build knows of the others.
    """
    known = [
        ((table.is_near, bool(own.stale)), table.chip, own)
        for table in tables
        if (own := table.row(problem, versions)) is not None
    ]
    if not known:
        return None
    best, chip, _ = min(known, key=lambda row: row[0])
    equals = [own for standing, other, own in known if standing == best and other.is_like(chip)]
    here = versions.keys() if versions else None
    return reduce(partial(_filled, here=here), equals).timings()


def _filled(first: Row, second: Row, here: Collection[str] | None) -> Row:
    """`first` with the kernels, and token counts of its kernels, that only `second` has.

    A count that some of the kernels were not measured for would favour the others: where `second`
    adds a kernel that is `here` (None: any may be), its counts alone are kept.
    """
    ours, theirs = first.cells, second.cells
    added = theirs.keys() - ours.keys()
    is_wider = bool(added if here is None else added & set(here))
    tokens = second.columns if is_wider else first.columns | second.columns
    cells = {name: {**theirs.get(name, {}), **ours.get(name, {})} for name in {**ours, **theirs}}
    if cells == ours:
        return first
    return Row(
        f"{first.source} over {second.source}",
        {name: {m: own[m] for m in own if m in tokens} for name, own in cells.items()},
        first.stale + tuple(entry for entry in second.stale if entry[0] in added),
        first.is_near,
    )


# ---------------------------------------------------------------- files


def user_folder() -> Path:
    """Where `vllm kernels tune` writes."""
    return Path(envs.VLLM_CACHE_ROOT, "kernel_tables")


def find_tables(chip: Chip) -> tuple[Table, ...]:
    """Of this chip, the user's first, then of chips with other memory."""
    every = list(_tables_of_architecture(chip))
    own = [table for table in every if table.chip.is_like(chip)]
    any_memory = replace(chip, memory_gb_per_s=0)
    near = [t for t in every if t not in own and t.chip.is_like(any_memory)]
    return (*own, *(replace(table, is_near=True) for table in near))


def missing_note(chip: Chip) -> str:
    """That all that was measured is of other chips of the architecture; "" where it is not so."""
    tables = find_tables(chip)
    if any(not table.is_near for table in tables):
        return ""
    others = tables or tuple(_tables_of_architecture(chip))
    if not others:
        return ""
    shown = ", ".join(f"{table.source} is of {table.name} ({table.chip})" for table in others)
    so = "choices are estimates" if tables else "the default order holds"
    return f"nothing was measured on this chip ({chip}), so {so}: {shown}"


def _tables_of_architecture(chip: Chip) -> Iterator[Table]:
    for folder in (user_folder(), SHIPPED):
        yield from read_whole(sorted(folder.glob(f"{chip.device.arch}[-_]*.json")), read_table)


def read_whole(paths: Iterable[Path], read: Callable[[Path], _T]) -> Iterator[_T]:
    """What `read` makes of each file. One in the user's folder that is broken is set aside: lost
    measurements must not keep a server from starting. Of the build's: the ConfigError of `read`."""
    for path in paths:
        try:
            found = read(path)
        except ConfigError as error:
            if not path.is_relative_to(user_folder()):
                raise
            set_aside(path, error.__cause__ or error)
        else:
            yield found


def read_table(path: Path) -> Table:
    """ConfigError names the file and what is wrong with it."""
    try:
        state = path.stat()
        return _read(path, state.st_mtime_ns, state.st_size, state.st_ino)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no table of measured kernels ({type(error).__name__}: {error}): delete it "
            f"and run vllm kernels tune again"
        ) from error


@lru_cache(maxsize=8)
def _read(path: Path, *state: int) -> Table:
    content = json.loads(path.read_text(encoding="utf-8"))
    # Versions before this one did not write the memory; their rows mean nothing here either.
    numbers = int(content["num_sms"]), int(content.get("memory_gb_per_s", 0))
    chip, rows = Chip(Device.parse(content["device"]), *numbers), _Rows(content["rows"])
    name, is_shipped = str(content["name"]), path.parent == SHIPPED
    if is_shipped:
        return Table(chip, name, rows, f"{SHIPPED.name}/{path.name}")
    return Table(chip, name, dict(rows), str(path))  # which may be broken anywhere


class _Rows(Mapping[str, Mapping[str, Entry]]):
    """Of a file, each parsed when it is asked for: a model has few of them."""

    def __init__(self, content: Mapping[str, Mapping[str, Any]]):
        self._content = {**content}
        self._parsed: dict[str, dict[str, Entry]] = {}

    def __getitem__(self, size_key: str) -> dict[str, Entry]:
        if size_key not in self._parsed:
            row, has_steps = self._content[size_key], is_of_attention(size_key)
            entries = {name: _parse_entry(entry, has_steps) for name, entry in row.items()}
            self._parsed[size_key] = entries
        return self._parsed[size_key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)


def is_of_attention(size_key: str) -> bool:
    """Whether the row has times of steps, not of numbers of tokens."""
    return size_key.startswith(f"{AttentionProblem.family} ")


def _parse_entry(entry: Mapping[str, Any], has_steps: bool) -> Entry:
    if has_steps and (others := entry.keys() & set(_BY_TOKENS) - {"us", "noise"}):
        raise ValueError(f"attention has no {', '.join(sorted(others))}")
    times: dict[str, Any] = {
        name: _by_column(name, entry.get(name, {}), has_steps) for name in _BY_TOKENS
    }
    error = _number(entry["error"]) if "error" in entry else None
    return Entry(str(entry["version"]), str(entry["date"]), error=error, **times)


def _by_column(name: str, values: Mapping[str, Any], has_steps: bool) -> Times:
    read = _number if name == "noise" else _microseconds
    return times_of(
        {Step.parse(m).name if has_steps else int(m): read(value) for m, value in values.items()}
    )


def _microseconds(value: Any) -> float:
    if not (us := _number(value)):
        raise ValueError(f"{value!r} is no number of microseconds")
    return us


def _number(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(number := float(value)) or number < 0:
        raise ValueError(f"{value!r} is no number from 0 up")
    return number


def write_table(path: Path, table: Table) -> None:
    """In one rename: readers see the old file or the new one. ConfigError where it cannot be."""
    rows = ",\n".join(
        f"  {json.dumps(size_key)}: {{\n{_row_text(row)}\n  }}"
        for size_key, row in sorted(table.rows.items(), key=_by_size)
    )
    head = {**asdict(table.chip), "device": str(table.chip.device), "name": table.name}
    text = f'{json.dumps(head)[:-1]},\n "rows": {{\n{rows}\n }}}}\n'
    write_whole(path, text)


def write_whole(path: Path, text: str) -> None:
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def _row_text(row: Mapping[str, Entry]) -> str:
    entries = sorted(row.items())
    return ",\n".join(f"   {json.dumps(name)}: {json.dumps(_entry_json(e))}" for name, e in entries)


def _entry_json(entry: Entry) -> dict[str, Any]:
    """Times with four digits and the rest with two: more would be noise."""
    content: dict[str, Any] = {"version": entry.version, "date": entry.date}
    for name in _BY_TOKENS:
        if times := getattr(entry, name):
            digits = 2 if name == "noise" else 4
            content[name] = {m: float(f"{us:.{digits}g}") for m, us in times}
    return content if entry.error is None else {**content, "error": float(f"{entry.error:.2g}")}


def _by_size(item: tuple[str, Any]) -> tuple[str, list[int], str]:
    """Of attention its heads, and their size."""
    if is_of_attention(item[0]):
        return AttentionProblem.family, [int(size) for size in re.findall(r"\d+", item[0])], item[0]
    weight, _, sizes = item[0].partition(":")
    numbers = sizes.partition(" ")[0].replace("/", "x").split("x")
    return weight, [int(size) for size in numbers], item[0]
