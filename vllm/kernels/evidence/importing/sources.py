"""Reads AIConfigurator's measurements: its repository, or Parquet files thinned out of it.

A checkout has `.../data/<system>/[<family>/]<framework>/<version>/gemm_perf.parquet` and
`moe_perf.parquet` (`.txt` in older ones: CSV), in milliseconds. The thinned form has
`<system>_gemm.parquet` and `<system>_moe.parquet` in one folder, in microseconds, whose `source` is
`framework version: label`. Nothing is repaired: a file with a wrong value is refused.
"""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from vllm.errors import ConfigError, did_you_mean
from vllm.kernels.evidence.imported import BALANCED, SKEWED, Size
from vllm.kernels.evidence.tables import Chip
from vllm.machine import Device
from vllm.utils.dataclasses import dataclass


class System(NamedTuple):
    """ranks: whether choices may follow its times; not where we measure ourselves."""

    chip: Chip
    name: str
    ranks: bool = True


def _chip(arch: str, num_sms: int | None = None, memory_gb_per_s: int = 0) -> Chip:
    return Chip(Device.parse(arch), num_sms, memory_gb_per_s)


SYSTEMS = {
    "b200_sxm": System(_chip("sm_100"), "B200"),
    "b300_sxm": System(_chip("sm_103"), "B300"),
    "rtx_pro_6000_server": System(_chip("sm_120", 188), "RTX PRO 6000 Server"),
    "l40s": System(_chip("sm_89", 142, 864), "L40S"),
    "a100_sxm": System(_chip("sm_80", 108), "A100 SXM"),
    "h100_sxm": System(_chip("sm_90", 132, 3352), "H100 SXM", ranks=False),
    "h200_sxm": System(_chip("sm_90", 132, 4814), "H200 SXM", ranks=False),
}

# By the name in a file: our problem family.
FAMILIES = {"gemm": "linear", "moe": "moe"}
_SIZES = {
    "linear": ("n", "k"),
    "moe": ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"),
}
_TOKENS = {"linear": "m", "moe": "num_tokens"}
_DTYPE = {"linear": "gemm_dtype", "moe": "moe_dtype"}
_SOURCE = re.compile(r"(\w+) (\S+): (\S.*)")
# What is kept of a checkout, which the thinned form has already.
_MOST_TOKENS, _MOST_TP, _MOST_EP = 16384, 8, 16
ROUTINGS = (BALANCED, SKEWED)
# vLLM's layers of scale blocks: fewer tokens than this are nothing but host time.
_HOST_BOUND_TOKENS = 1024
# Of all times of a file: no layer takes less, and the sizes that are measured do not take more.
_LEAST_MEDIAN_US, _MOST_MEDIAN_US = 2.0, 5000.0


class Row(NamedTuple):
    """size: as `imported.Size`. us: microseconds."""

    framework: str
    version: str
    label: str
    dtype: str
    size: Size
    routing: str
    tokens: int
    us: float


@dataclass(frozen=True)
class Source:
    """The files of one system and problem family, one for each framework in a checkout."""

    system: str
    family: str
    paths: tuple[Path, ...]
    is_checkout: bool

    def rows(self) -> list[Row]:
        """ConfigError names the file and what is wrong with it."""
        return [row for path in self.paths for row in _rows(path, self.family, self.is_checkout)]


# ---------------------------------------------------------------- which files


def find_sources(folder: Path) -> tuple[list[Source], list[str]]:
    """Those of `folder` and what is left out; ConfigError where there is nothing to read."""
    if not folder.is_dir():
        raise ConfigError(f"--from {folder}: there is no such folder")
    thinned = sorted(p for family in FAMILIES for p in folder.glob(f"*_{family}.parquet"))
    if thinned:
        return [_thinned(path) for path in thinned], []
    sources, others = _of_checkout(folder)
    if not sources:
        raise ConfigError(
            f"--from {folder}: it has no <system>_gemm.parquet or <system>_moe.parquet, and no "
            f"<system>/<framework>/<version>/gemm_perf.parquet below it, for a system of "
            f"{', '.join(SYSTEMS)}"
        )
    return sources, [f"{system}: no tables are made of it" for system in others]


def _thinned(path: Path) -> Source:
    system, _, family = path.stem.rpartition("_")
    if system not in SYSTEMS:
        raise ConfigError(
            f"{path}: unknown chip {system!r}: it takes {', '.join(SYSTEMS)}"
            f"{did_you_mean(system, SYSTEMS)}"
        )
    return Source(system, FAMILIES[family], (path,), False)


def _of_checkout(folder: Path) -> tuple[list[Source], list[str]]:
    """The newest version of each framework, and systems that are left out."""
    newest: dict[tuple[str, str], dict[str, Path]] = {}
    for name, family in FAMILIES.items():
        for path in sorted(
            (*folder.rglob(f"{name}_perf.txt"), *folder.rglob(f"{name}_perf.parquet"))
        ):
            *_, framework, version, _ = path.parts
            above = path.parents[2]
            system = above.parent.name if above.name in FAMILIES else above.name
            known = newest.setdefault((system, family), {})
            other = known.get(framework)
            if other is None or _version_key(other.parent.name) <= _version_key(version):
                known[framework] = path
    found = [
        Source(system, family, tuple(paths[name] for name in sorted(paths)), True)
        for (system, family), paths in sorted(newest.items())
        if system in SYSTEMS
    ]
    return found, sorted({system for system, _ in newest} - SYSTEMS.keys())


def _version_key(version: str) -> tuple[tuple[int, int], ...]:
    """Orders 1.3.0rc5 before 1.3.0rc20 and before 1.3.0."""
    items = re.findall(r"\d+|[a-z]+", version.partition("+")[0].lower())
    key = tuple((1, int(item)) if item.isdigit() else (-1, len(item)) for item in items)
    return (*key, (0, 0))


def commit_of(folder: Path) -> str | None:
    """The commit that README.md of the folder names; None where it names none."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    found = re.search(r"\bcommit ([0-9a-f]{40})\b", text)
    return found[1] if found else None


# ---------------------------------------------------------------- rows of a file


def _rows(path: Path, family: str, is_checkout: bool) -> Iterator[Row]:
    tokens, sizes = _TOKENS[family], _SIZES[family]
    texts = ("framework", "version", "kernel_source", _DTYPE[family]) if is_checkout else (
        "source", "dtype")  # fmt: skip
    routing = ("distribution",) if family == "moe" else ()
    time = "latency" if is_checkout else "us"
    names = (*texts, *routing, tokens, *sizes, time)
    columns = _columns(path, names)
    us = [value * (1000 if is_checkout else 1) for value in _times(path, time, columns[time])]
    _check_unit(path, time, us)
    whole = {name: _whole_numbers(path, name, columns[name]) for name in (tokens, *sizes)}
    kernels = _kernels(path, [columns[name] for name in texts])
    routings = columns["distribution"] if routing else [""] * len(us)
    rows = zip(kernels, zip(*(whole[name] for name in sizes)), routings, whole[tokens], us)
    for (framework, version, label, dtype), size, routed, num_tokens, time_us in rows:
        if _is_kept(framework, dtype, size, routed, num_tokens):
            yield Row(framework, version, label, dtype, _size(size), routed, num_tokens, time_us)


def _kernels(path: Path, columns: Sequence[Sequence[Any]]) -> list[tuple[str, str, str, str]]:
    """Framework, version, label and dtype of each row."""
    if len(columns) == 4:
        return [(str(f).lower(), str(v), str(s), str(d)) for f, v, s, d in zip(*columns)]
    parsed = {source: _SOURCE.fullmatch(str(source)) for source in set(columns[0])}
    for source, match in parsed.items():
        if match is None:
            raise ConfigError(f"{path}: source {source!r} is not 'framework version: kernel'")
    return [
        (match[1].lower(), match[2], match[3], str(dtype))
        for source, dtype in zip(*columns)
        if (match := parsed[source])
    ]


def _is_kept(
    framework: str, dtype: str, size: tuple[int, ...], routing: str, num_tokens: int
) -> bool:
    if num_tokens > _MOST_TOKENS or num_tokens & (num_tokens - 1):
        return False
    if len(size) == 2:
        is_host_bound = framework == "vllm" and dtype == "fp8_block"
        return not is_host_bound or num_tokens > _HOST_BOUND_TOKENS
    _, intermediate, _, num_experts, tp, ep = size
    divides = intermediate % tp == 0 and num_experts % ep == 0
    return tp <= _MOST_TP and ep <= _MOST_EP and divides and routing in ROUTINGS


def _size(size: tuple[int, ...]) -> Size:
    if len(size) == 2:
        return size
    hidden, intermediate, top_k, num_experts, tp, ep = size
    return hidden, intermediate // tp, top_k, num_experts, ep


# ---------------------------------------------------------------- columns and their values


def _columns(path: Path, names: Sequence[str]) -> Mapping[str, list[Any]]:
    found = _csv(path) if path.suffix == ".txt" else _parquet(path, names)
    if missing := [name for name in names if name not in found]:
        raise ConfigError(
            f"{path}: no column {missing[0]!r}; it has {', '.join(found) or 'none'}, and "
            f"{', '.join(names)} are expected"
        )
    if not found[names[0]]:
        raise ConfigError(f"{path}: it has no rows")
    return found


def _parquet(path: Path, names: Sequence[str]) -> Mapping[str, list[Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(
            f"{path}: reading Parquet needs pyarrow ({error}): pip install 'vllm[import]'"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            known = file.schema_arrow.names
            read = file.read([name for name in names if name in known])
        return {**{name: [] for name in known}, **read.to_pydict()}
    except (ArrowException, OSError, ValueError) as error:
        if _is_lfs_pointer(path):
            raise ConfigError(f"{path} is a pointer of Git LFS: run git lfs pull") from error
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{path} is not readable as Parquet ({reason}): fetch it again"
        ) from error


def _csv(path: Path) -> Mapping[str, list[Any]]:
    if _is_lfs_pointer(path):
        raise ConfigError(f"{path} is a pointer of Git LFS: run git lfs pull")
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is not readable as CSV ({error}): fetch it again") from error
    return {name: [row[name] for row in rows] for name in reader.fieldnames or ()}


def _is_lfs_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(40).startswith(b"version https://git-lfs")
    except OSError:
        return False


def _times(path: Path, name: str, values: Sequence[Any]) -> list[float]:
    found = []
    for number, value in enumerate(values, 1):
        try:
            time = float(value)
        except (TypeError, ValueError):
            time = -1.0
        if not isfinite(time) or time <= 0:
            raise ConfigError(
                f"{path}: row {number}: {name} = {value!r}: a time is a number above 0"
            )
        found.append(time)
    return found


def _check_unit(path: Path, name: str, us: Sequence[float]) -> None:
    middle = median(us)
    if not _LEAST_MEDIAN_US <= middle <= _MOST_MEDIAN_US:
        unit = "milliseconds" if name == "latency" else "microseconds"
        raise ConfigError(
            f"{path}: half of its times are below {middle:.3g} us, and {_LEAST_MEDIAN_US:g} to "
            f"{_MOST_MEDIAN_US:g} us are plausible: column {name!r} is not in {unit}"
        )


def _whole_numbers(path: Path, name: str, values: Sequence[Any]) -> list[int]:
    found = []
    for number, value in enumerate(values, 1):
        try:
            whole = int(value)
        except (TypeError, ValueError):
            whole = 0
        if whole < 1 or (isinstance(value, float) and whole != value):
            raise ConfigError(
                f"{path}: row {number}: {name} = {value!r}: it is a whole number from 1 up"
            )
        found.append(whole)
    return found
