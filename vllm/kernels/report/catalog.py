"""What kernels exist, in words, as the specs declare: for `vllm kernels list` and the docs."""

from collections.abc import Iterable
from typing import Any

from vllm.kernels import registry
from vllm.kernels.report.columns import columns
from vllm.kernels.select.spec import KernelSpec
from vllm.machine import NATIVE, Device, Lib, arch_key

DECLARED_ONLY = "declared only"


def entries(family: str, device: Device | None = None) -> list[dict[str, Any]]:
    """The kernels of a family in order of preference; if given, those that run on `device`, in the
    order there."""
    specs = registry.specs(family, device.family if device is not None else "")
    return [_entry(spec) for spec in specs if device is None or _runs_on(spec, device)]


def _runs_on(spec: KernelSpec, device: Device) -> bool:
    return device.family in spec.devices or device.arch in spec.devices


def _entry(spec: KernelSpec) -> dict[str, Any]:
    """limits: what it asks of sizes. is_built: its code is in this build; otherwise it is declared,
    so that choices can be explained, and never runs."""
    return {
        "family": spec.family,
        "backend": spec.backend,
        "formats": sorted(spec.formats),
        "chips": sorted(spec.devices, key=lambda name: arch_key(name.replace("x", "0"))),
        "dtypes": sorted(spec.dtypes),
        "activations": sorted(spec.act),
        "scales": [_on(family, str(form)) for family, form in spec.scales],
        "needs": list(_needs(spec)),
        "limits": list(_limits(spec)),
        "guarantees": sorted(spec.guarantees),
        "is_built": registry.has_code(spec),
    }


def _on(family: str, what: str) -> str:
    return what if family == "*" else f"{what} on {family}"


def _needs(spec: KernelSpec) -> Iterable[str]:
    archs = ", ".join(sorted(spec.native_archs, key=arch_key))
    for name, minimum in spec.libs:
        need = f"{name} >= {minimum}" if minimum else name
        if name == NATIVE:
            need = f"native kernels for {archs}" if archs else "native kernels"
        carried = [_on(family, f"{arch} code") for family, lib, arch in spec.carries if lib == name]
        carried += [_on(chips, module) for chips, lib, module in spec.prebuilt if lib == name]
        yield f"{need} (with {', '.join(carried)})" if carried else need


def _limits(spec: KernelSpec) -> Iterable[str]:
    if spec.n_align > 1:
        yield f"N % {spec.n_align} = 0"
    if spec.k_align > 1:
        yield f"K % {spec.k_align} = 0"
    if spec.blocks:
        yield "blocks " + ", ".join(f"{rows}x{columns}" for rows, columns in sorted(spec.blocks))
    if not spec.takes_bias:
        yield "no bias"
    if spec.layouts != {"standard"}:
        yield "activations " + ", ".join(sorted(spec.layouts, reverse=True))
    if spec.is_emulation:
        yield "emulation: for numbers, not for speed"


def text(found: Iterable[dict[str, Any]], width: int) -> str:
    """A table per family; a backend's name stands once."""
    head = ("backend", "in this build", "formats", "chips", "needs")
    tables: dict[str, list[tuple[str, ...]]] = {}
    for entry in found:
        row = (
            entry["backend"],
            "yes" if entry["is_built"] else DECLARED_ONLY,
            *(", ".join(entry[name]) or "-" for name in ("formats", "chips", "needs")),
        )
        tables.setdefault(entry["family"], [head]).append(row)
    widths = [
        min(22, max(len(row[i]) for rows in tables.values() for row in rows)) for i in range(4)
    ] if tables else []  # fmt: skip
    lines = []
    for family, rows in tables.items():
        lines += ["", f"{family}, in order of preference"]
        previous = ""
        for backend, *rest in rows:
            lines += columns(["" if backend == previous else backend, *rest], widths, width)
            previous = backend
    return "\n".join(lines[1:])


def native_text(library: Lib | None, width: int) -> str:
    """Our native GPU kernels with the architectures they were built for, from the manifest."""
    if library is None:
        return "native library: not built (make build, make build-cuda)"
    if library.broken:
        return f"native library: broken: {library.broken}"
    archs_of: dict[str, list[str]] = {}
    for kernel, _, arch in (name.partition("/") for name in library.archs):
        archs_of.setdefault(kernel, []).append(arch)
    if not archs_of:
        return f"native library {library.version}: kernels for CPUs only (make build-cuda for GPUs)"
    widths = [max(map(len, archs_of))]
    lines = [f"native library {library.version}, GPU kernels and what they were built for"]
    for kernel, archs in archs_of.items():
        lines += columns([kernel, " ".join(archs)], widths, width)
    return "\n".join(lines)
