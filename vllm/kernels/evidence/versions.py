"""Which code a kernel is: what a measurement of it, or its failure, holds for.

`deep_gemm 0.1.3`, `native 0.1.0 (aab4de81)`: versions of the libraries that it is made of, and of
our own kernels the build id too, since their code changes within a version. Of a backend of another
package or of a file also that file: `torch 2.13.0, mine.py 1b2c3d4e`.
"""

from collections.abc import Iterable
from functools import lru_cache

from vllm.kernels import registry
from vllm.kernels.select.decision import Record
from vllm.kernels.select.reason import Why
from vllm.kernels.select.spec import KernelSpec
from vllm.machine import Device, Lib, Libs


def version_of(spec: KernelSpec, libs: Libs, device: Device) -> str:
    """Of torch where the kernel needs nothing else."""
    names = [name for name, _ in spec.libs] or ["torch"]
    found = (libs.get(name) for name in names)
    texts = [_text(lib, spec, device) for lib in found if lib is not None]
    return ", ".join(filter(None, (*texts, registry.code_version(spec.backend))))


def _text(lib: Lib, spec: KernelSpec, device: Device) -> str:
    builds = "+".join(_builds(lib, spec, device))
    return f"{lib.name} {lib.version}".strip() + (f" ({builds})" if builds else "")


def _builds(lib: Lib, spec: KernelSpec, device: Device) -> Iterable[str]:
    """Build ids of those kernels that run on the chip: the others are of no consequence there."""
    archs = [carried.rpartition("/") for carried in lib.archs]
    for kernel, _, build in (known.partition(":") for known in lib.builds):
        own = [arch for name, _, arch in archs if name == kernel and arch[0].isdigit()]
        runs = device.kind == "cpu" or any(device.runs(arch) for arch in own)
        if kernel in spec.native and runs:
            yield build


def is_same(measured: str, here: str) -> bool:
    """Whether both name one code; a version or build id that `here` leaves out may be any."""
    parts = measured.split(", ")
    return all(
        any(part == known or part.startswith(f"{known} ") for part in parts)
        for known in here.split(", ")
    )


@lru_cache(maxsize=256)
def versions_here(family: str, weight_format: str, device: Device, libs: Libs) -> dict[str, str]:
    """By backend, of its kernel for the format; without those whose libraries are not all here."""
    return {
        spec.backend: version_of(spec, libs, device)
        for spec in registry.specs(family)
        if weight_format in spec.formats
        and all((lib := libs.get(name)) and not lib.broken for name, _ in spec.libs)
    }


def stale_lines(records: Iterable[Record]) -> list[str]:
    """What was measured of kernels that could run, and is another version here, one line each."""
    return [
        f"{backend} was measured as {measured} and is {here} here: what is expected of it is an "
        f"estimate until vllm kernels tune has measured it again"
        for backend, measured, here in _stale(records)
    ]


def stale_summary(records: Iterable[Record]) -> str:
    """The same in one line; "" for nothing."""
    names = dict.fromkeys(backend for backend, *_ in _stale(records))
    if not names:
        return ""
    return (
        f"{', '.join(names)}: measured in another version than the one here, so what is expected "
        f"is an estimate until vllm kernels tune has run; vllm kernels explain says which version"
    )


def _stale(records: Iterable[Record]) -> dict[tuple[str, str, str], None]:
    found: dict[tuple[str, str, str], None] = {}
    for decision in {id(decision): decision for _, decision in records}.values():
        if decision.timings is None or not decision.timings.stale:
            continue
        able = {
            candidate.backend
            for candidate in decision.candidates
            if all(reason.why in (Why.POLICY, Why.SHAPE) for reason in candidate.reasons)
        }
        for entry in decision.timings.stale:
            if entry[0] in able:
                found[entry] = None
    return found
