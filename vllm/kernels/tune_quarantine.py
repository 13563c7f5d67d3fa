"""Kernels that failed when they were tried on this machine: a file, and what of it holds now.

`vllm kernels tune` enters a kernel that faults, hangs, raises or computes something else; the
selector then rejects it with that reason, for the same problem, chip and versions of libraries.
Installing another version, or `vllm kernels quarantine --clear`, lifts it.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vllm.errors import ConfigError
from vllm.kernels import registry
from vllm.kernels.spec import Device, KernelSpec, Libs, Quarantined, Reason, Why
from vllm.kernels.tune_table import user_folder, write_whole

FILE_NAME = "quarantine.json"
LIFT = "vllm kernels quarantine --clear"


@dataclass(frozen=True, slots=True)
class Failure:
    """why: `numerics` for wrong results, `library` for a fault, a hang or an error. size_key: of
    the LinearProblem. version: of the libraries that the backend is made of."""

    backend: str
    version: str
    device: str
    size_key: str
    why: str
    reason: str
    date: str


def path_of_file() -> Path:
    return user_folder() / FILE_NAME


def read_failures() -> list[Failure]:
    """ConfigError for a file that is not what `write_failures` wrote."""
    path = path_of_file()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        failures = [Failure(**entry) for entry in content]
        for failure in failures:
            Device.parse(failure.device), Why(failure.why)
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is no quarantine file ({error}): delete it") from error
    return failures


def write_failures(failures: Iterable[Failure]) -> None:
    text = ",\n".join(json.dumps(asdict(failure)) for failure in failures)
    write_whole(path_of_file(), f"[{text}]\n")


def add_failure(failure: Failure) -> None:
    """Enters it; it replaces an earlier one of the same kernel and problem."""
    kept = [f for f in read_failures() if _place(f) != _place(failure)]
    write_failures([*kept, failure])


def _place(failure: Failure) -> tuple[str, str, str]:
    return failure.backend, failure.device, failure.size_key


def with_quarantine(libs: Libs, device: Device) -> Libs:
    """`libs` with what the file says of this chip and these versions."""
    found = frozenset(
        Quarantined(f.backend, f.size_key, Reason(Why(f.why), _text(f)))
        for f in read_failures()
        if Device.parse(f.device).arch == device.arch and f.version in _versions(f.backend, libs)
    )
    return replace(libs, quarantined=found) if found else libs


def _text(failure: Failure) -> str:
    return f"quarantined on {failure.date}: {failure.reason} ({LIFT} lifts it)"


def _versions(backend: str, libs: Libs) -> set[str]:
    return {version_of(spec, libs) for spec in registry.specs("linear") if spec.backend == backend}


def version_of(spec: KernelSpec, libs: Libs) -> str:
    """Of what the kernel is made of: `deep_gemm 0.1.3`; of torch where it needs nothing else."""
    names = [name for name, _ in spec.libs] or ["torch"]
    found = ((name, libs.get(name)) for name in names)
    return ", ".join(f"{name} {lib.version}".strip() for name, lib in found if lib is not None)


def text(failures: Sequence[Failure]) -> str:
    """For people, one line each."""
    lines = [
        f"{f.backend:<20}  {f.size_key}  {f.device}  {f.version}\n    {f.date}  {f.why}: {f.reason}"
        for f in failures
    ]
    return "\n".join(lines)
