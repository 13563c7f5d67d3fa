"""Tables of measured kernels: a file for each chip, a row for each size, format and type.

This build ships some in `tuned/`; `vllm kernels tune` writes a user's own to
`VLLM_CACHE_ROOT/kernel_tables/`, whose rows come before those of the build. A file is its own
checkpoint: it is rewritten whole after every kernel that was measured.
"""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial, reduce
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.errors import ConfigError
from vllm.kernels.evidence.splits import Timings
from vllm.kernels.evidence.versions import is_same
from vllm.kernels.select.grade import Grade
from vllm.kernels.select.problem import LinearProblem, MoEProblem, Problem
from vllm.machine import Device
from vllm.utils.files import write_atomically

SHIPPED = Path(__file__).parent / "tuned"

# Two bandwidths within this share of each other are one memory at two settings of its clock.
_SAME_MEMORY = 0.05

# Numbers of tokens that are measured: sizes of captured graphs (worker/cuda_graph.py), and steps
# of prompts above.
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Entry:
    """One backend measured for one row. version: of the libraries it is made of. us: (tokens,
    microseconds of a call, quantising activations included), ascending. quantised_us: the same for
    activations that are quantised already, () for a kernel that does not take such; it counts where
    it is known and the layer comes after a norm or an activation function, which quantise in the
    pass they make anyway."""

    version: str
    date: str
    us: tuple[tuple[int, float], ...]
    quantised_us: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Table:
    """What was measured on one kind of chip. name: the chip as its vendor calls it. rows: by
    `size_key` of a problem, by backend. is_near: the chip is another than the one asked about."""

    chip: Chip
    name: str
    rows: Mapping[str, Mapping[str, Entry]] = field(default_factory=dict)
    source: str = ""
    is_near: bool = False

    def timings(
        self, problem: Problem, versions: Mapping[str, str] | None = None
    ) -> Timings | None:
        """What it says of `problem`; None where nobody measured that, or where a shard has partial
        scale blocks, which kernels pay for differently. versions: by backend, what is here."""
        if not isinstance(problem, LinearProblem | MoEProblem) or not is_measurable(problem):
            return None
        row = self.rows.get(problem.size_key)
        if not row:
            return None
        takes = isinstance(problem, MoEProblem) or problem.comes_quantised
        us = {
            name: dict(entry.us) | (dict(entry.quantised_us) if takes else {})
            for name, entry in row.items()
        }
        tokens = sorted({m for own in us.values() for m in own})
        date = max(entry.date for entry in row.values())
        stale = tuple(
            (name, entry.version, versions[name])
            for name, entry in row.items()
            if versions and name in versions and not is_same(entry.version, versions[name])
        )
        others = "; another chip" if self.is_near else ""
        if stale:
            others += f"; {', '.join(name for name, *_ in stale)} in another version"
        return Timings(
            f"{self.source} ({self.name}, {date}{others})",
            tuple(tokens),
            tuple((name, tuple(map(own.get, tokens))) for name, own in us.items()),
            stale,
            Grade.ESTIMATED if self.is_near else Grade.MEASURED,
        )

    def entry(self, size_key: str, backend: str, version: str) -> Entry | None:
        """What was measured of this version of the backend."""
        known = self.rows.get(size_key, {}).get(backend)
        return known if known is not None and known.version == version else None

    def with_entry(self, size_key: str, backend: str, entry: Entry) -> "Table":
        row = {**self.rows.get(size_key, {}), backend: entry}
        return replace(self, rows={**self.rows, size_key: row})


def is_measurable(problem: LinearProblem | MoEProblem) -> bool:
    """Whether `size_key` says everything that a kernel's speed depends on."""
    if isinstance(problem, MoEProblem):
        is_whole = problem.cut == problem.cut_experts == 1
        return is_whole and problem.layout == "standard"
    return problem.block_fit(takes_any_block=False) is None


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
        if (own := table.timings(problem, versions)) is not None
    ]
    if not known:
        return None
    best, chip, _ = min(known, key=lambda row: row[0])
    equals = [own for standing, other, own in known if standing == best and other.is_like(chip)]
    here = versions.keys() if versions else None
    return reduce(partial(_filled, here=here), equals)


def _filled(first: Timings, second: Timings, here: Collection[str] | None) -> Timings:
    """`first` with the kernels, and token counts of its kernels, that only `second` has.

    A count that some of the kernels were not measured for would favour the others: where `second`
    adds a kernel that is `here` (None: any may be), its counts alone are kept.
    """
    ours, theirs = (
        {name: _known(zip(own.tokens, times)) for name, times in own.us} for own in (first, second)
    )
    added = theirs.keys() - ours.keys()
    is_wider = bool(added if here is None else added & set(here))
    tokens = {*second.tokens} if is_wider else {*first.tokens, *second.tokens}
    us = {name: theirs.get(name, {}) | ours.get(name, {}) for name in {**ours, **theirs}}
    if us == ours:
        return first
    columns = sorted(tokens)
    return Timings(
        f"{first.source} over {second.source}",
        tuple(columns),
        tuple((name, tuple(map(times.get, columns))) for name, times in us.items()),
        first.stale + tuple(entry for entry in second.stale if entry[0] in added),
        first.grade,
    )


def _known(times: Iterable[tuple[int, float | None]]) -> dict[int, float]:
    return {m: time for m, time in times if time is not None}


# ---------------------------------------------------------------- files


def user_folder() -> Path:
    """Where `vllm kernels tune` writes."""
    return Path(envs.VLLM_CACHE_ROOT, "kernel_tables")


def find_tables(chip: Chip) -> tuple[Table, ...]:
    """Of this chip, the user's first, then of chips with other memory; ConfigError if broken."""
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
        for path in sorted(folder.glob(f"{chip.device.arch}[-_]*.json")):
            yield read_table(path)


def read_table(path: Path) -> Table:
    """ConfigError names the file and what is wrong with it."""
    try:
        state = path.stat()
        table = _read(path, state.st_mtime_ns, state.st_size, state.st_ino)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no table of measured kernels ({type(error).__name__}: {error}): delete it "
            f"and run vllm kernels tune again"
        ) from error
    shown = f"tuned/{path.name}" if path.parent == SHIPPED else str(path)
    return replace(table, source=shown)


@lru_cache(maxsize=8)
def _read(path: Path, *state: int) -> Table:
    return _parse(json.loads(path.read_text(encoding="utf-8")))


def _parse(content: Mapping[str, Any]) -> Table:
    rows = {
        str(size_key): {
            str(backend): Entry(
                str(entry["version"]),
                str(entry["date"]),
                _times(entry.get("us", {})),
                _times(entry.get("quantised_us", {})),
            )
            for backend, entry in row.items()
        }
        for size_key, row in content["rows"].items()
    }
    # Versions before this one did not write the memory; their rows mean nothing here either.
    numbers = int(content["num_sms"]), int(content.get("memory_gb_per_s", 0))
    return Table(Chip(Device.parse(content["device"]), *numbers), str(content["name"]), rows)


def _times(us: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted((int(m), _microseconds(value)) for m, value in us.items()))


def _microseconds(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(us := float(value)) or us <= 0:
        raise ValueError(f"{value!r} is no number of microseconds")
    return us


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
    """Times with four digits: more would be noise."""
    content: dict[str, Any] = {"version": entry.version, "date": entry.date}
    for name in ("us", "quantised_us"):
        if times := getattr(entry, name):
            content[name] = {m: float(f"{us:.4g}") for m, us in times}
    return content


def _by_size(item: tuple[str, Any]) -> tuple[str, list[int]]:
    weight, _, sizes = item[0].partition(":")
    return weight, [int(size) for size in sizes.partition(" ")[0].split("x")]
