"""Kernels that failed when they were tried on this machine: a file, and what of it holds now.

`vllm kernels tune` enters a kernel that faults, hangs, raises or computes something else, and so
does a start of the engine, before a kernel serves; the selector then rejects it for the same
problem, chip and versions, until another is installed or `vllm kernels quarantine --clear` runs.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from vllm.errors import ConfigError
from vllm.kernels import registry
from vllm.kernels.evidence.tables import user_folder, write_whole
from vllm.kernels.evidence.versions import version_of
from vllm.kernels.select.reason import Why
from vllm.machine import Device, Libs, Quarantined
from vllm.utils.dataclasses import asdict, dataclass, replace
from vllm.utils.files import locked, set_aside
from vllm.version import __version__

FILE_NAME = "quarantine.json"
LIFT = "vllm kernels quarantine --clear"


@dataclass(frozen=True)
class Failure:
    """why: `numerics` for wrong results, `library` for a fault, a hang or an error. size_key: of
    the problem. version: which code it is (versions.py), as release `release` of this package
    calls it."""

    backend: str
    version: str
    device: str
    size_key: str
    why: str
    reason: str
    date: str
    release: str = __version__


def path_of_file() -> Path:
    return user_folder() / FILE_NAME


def read_failures() -> list[Failure]:
    """None, and a warning, for a file that is not what `write_failures` wrote: a kernel that failed
    fails again at its first call."""
    path = path_of_file()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        failures = [Failure(**entry) for entry in content]
        for failure in failures:
            Device.parse(failure.device), Why(failure.why)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError, TypeError) as error:
        set_aside(path, f"no quarantine file: {error}")
        return []
    return failures


def write_failures(failures: Iterable[Failure]) -> None:
    text = ",\n".join(json.dumps(asdict(failure)) for failure in failures)
    write_whole(path_of_file(), f"[{text}]\n")


def add_failure(failure: Failure) -> None:
    """In place of an earlier one of this kernel and problem; ConfigError for a file that fails."""
    with _alone():
        kept = [f for f in read_failures() if _place(f) != _place(failure)]
        write_failures([*kept, failure])


def forget(backend: str | None) -> list[Failure]:
    """Those of that backend, or all; returns what they were."""
    with _alone():
        failures = read_failures()
        meant = [f for f in failures if backend in (None, f.backend)]
        if meant:
            write_failures([f for f in failures if f not in meant])
        return meant


@contextmanager
def _alone() -> Iterator[None]:
    """One process at a time, where the file system has locks."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(path_of_file()))
        except OSError as error:
            why = error.strerror
            raise ConfigError(f"{path_of_file()} cannot be written: {why}") from error
        yield


def _place(failure: Failure) -> tuple[str, str, str]:
    return failure.backend, failure.device, failure.size_key


def with_quarantine(libs: Libs, device: Device) -> Libs:
    """`libs` with what the file says of this chip and these versions."""
    found = frozenset(
        Quarantined(
            f.backend, f.size_key, f.why, f"quarantined on {f.date}: {f.reason} ({LIFT} lifts it)"
        )
        for f in read_failures()
        if f.release == __version__
        and Device.parse(f.device).arch == device.arch
        and f.version in _versions(f.backend, libs, device)
    )
    return replace(libs, quarantined=found) if found else libs


def _versions(backend: str, libs: Libs, device: Device) -> set[str]:
    own = (spec for spec in registry.all_specs() if spec.backend == backend)
    return {version_of(spec, libs, device) for spec in own}


def text(failures: Sequence[Failure]) -> str:
    """For people, one line each."""
    lines = [
        f"{f.backend:<20}  {f.size_key}  {f.device}  {f.version}\n    {f.date}  {f.why}: {f.reason}"
        for f in failures
    ]
    return "\n".join(lines)
