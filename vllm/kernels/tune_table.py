"""Tables of measured kernels: files keyed by (chip, number of SMs), rows by (N, K, format, type).

This build ships some in `tuned/`; `vllm kernels tune` writes a user's own to
`VLLM_CACHE_ROOT/kernel_tables/`, whose rows come before those of the build. A file is its own
checkpoint: it is rewritten whole after every kernel that was measured.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.errors import ConfigError
from vllm.kernels.fit import linear_fit
from vllm.kernels.problem import LinearProblem, MoEProblem, Problem
from vllm.kernels.spec import Device, Timings

SHIPPED = Path(__file__).parent / "tuned"

# Numbers of tokens that are measured: sizes of captured graphs (worker/cuda_graph.py), and steps
# of prompts above.
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class Entry:
    """One backend measured for one row. version: of the libraries it is made of. us: (tokens,
    microseconds of a call, quantising activations included), ascending. quantised_us: the same for
    activations that are quantised already, () for a kernel that does not take such; it counts where
    it is known, because norms and activation functions quantise in the pass they make anyway."""

    version: str
    date: str
    us: tuple[tuple[int, float], ...]
    quantised_us: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Table:
    """What was measured on one kind of chip. num_sms: of a GPU its multiprocessors, of a CPU its
    cores. name: the chip as its vendor calls it. rows: by `size_key` of a problem, by backend."""

    device: Device
    num_sms: int
    name: str
    rows: Mapping[str, Mapping[str, Entry]] = field(default_factory=dict)
    source: str = ""

    def timings(self, problem: Problem) -> Timings | None:
        """What it says of `problem`; None where nobody measured that, or where a shard cuts scale
        blocks, which kernels pay for differently."""
        if not isinstance(problem, LinearProblem | MoEProblem) or not is_measurable(problem):
            return None
        row = self.rows.get(problem.size_key)
        if not row:
            return None
        us = {name: dict(entry.us) | dict(entry.quantised_us) for name, entry in row.items()}
        tokens = sorted({m for own in us.values() for m in own})
        date = max(entry.date for entry in row.values())
        return Timings(
            f"{self.source} ({self.name}, {date})",
            tuple(tokens),
            tuple((name, tuple(map(own.get, tokens))) for name, own in us.items()),
        )

    def with_entry(self, size_key: str, backend: str, entry: Entry) -> "Table":
        row = {**self.rows.get(size_key, {}), backend: entry}
        return replace(self, rows={**self.rows, size_key: row})


def is_measurable(problem: LinearProblem | MoEProblem) -> bool:
    """Whether `size_key` says everything that a kernel's speed depends on."""
    if isinstance(problem, MoEProblem):
        is_whole = problem.cut == problem.cut_experts == 1
        return is_whole and problem.layout == "standard"
    return problem.weight.scale != "block" or linear_fit(problem, takes_any_block=False) is None


def timings_of(tables: Sequence[Table], problem: Problem) -> Timings | None:
    """The row of the first table that has one."""
    return next((t for t in (table.timings(problem) for table in tables) if t is not None), None)


# ---------------------------------------------------------------- files


def user_folder() -> Path:
    """Where `vllm kernels tune` writes."""
    folder: Path = envs.VLLM_CACHE_ROOT
    return folder / "kernel_tables"


def file_name(device: Device, num_sms: int) -> str:
    """`sm_90_132.json`, `cpu-avx2_8.json`"""
    return f"{device.arch}{'-' * bool(device.isa)}{device.isa}_{num_sms}.json"


def find_tables(device: Device, num_sms: int | None) -> tuple[Table, ...]:
    """Tables for this chip, the user's before those of this build; ConfigError for a broken file.

    num_sms: None where only the chip is known; any number of SMs is then as good.
    """
    pattern = file_name(device, 0).replace(
        "_0.json", f"_{'*' if num_sms is None else num_sms}.json"
    )
    if device.kind == "cpu" and not device.isa:
        pattern = pattern.replace("cpu_", "cpu*_")
    return tuple(
        read_table(path) for folder in (user_folder(), SHIPPED) for path in _sorted(folder, pattern)
    )


def _sorted(folder: Path, pattern: str) -> Iterator[Path]:
    yield from sorted(folder.glob(pattern))


def read_table(path: Path) -> Table:
    """ConfigError names the file and what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        table = _parse(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no table of measured kernels ({type(error).__name__}: {error}): delete it "
            f"and run vllm kernels tune again"
        ) from error
    shown = f"tuned/{path.name}" if path.parent == SHIPPED else str(path)
    return replace(table, source=shown)


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
    device = Device.parse(content["device"])
    return Table(device, int(content["num_sms"]), str(content["name"]), rows)


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
    head = {"device": str(table.device), "num_sms": table.num_sms, "name": table.name}
    text = f'{json.dumps(head)[:-1]},\n "rows": {{\n{rows}\n }}}}\n'
    write_whole(path, text)


def write_whole(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def _row_text(row: Mapping[str, Entry]) -> str:
    return ",\n".join(
        f"   {json.dumps(backend)}: {json.dumps(_entry_json(entry))}"
        for backend, entry in sorted(row.items())
    )


def _entry_json(entry: Entry) -> dict[str, Any]:
    content: dict[str, Any] = {"version": entry.version, "date": entry.date}
    for name in ("us", "quantised_us"):
        if times := getattr(entry, name):
            content[name] = {m: _short(us) for m, us in times}
    return content


def _short(us: float) -> float:
    """Four digits: more would be noise."""
    return float(f"{us:.4g}")


def _by_size(item: tuple[str, Any]) -> tuple[str, list[int]]:
    weight, _, sizes = item[0].partition(":")
    return weight, [int(size) for size in sizes.partition(" ")[0].split("x")]
