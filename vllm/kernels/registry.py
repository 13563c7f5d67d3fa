"""The backends of each problem family, in default order of preference.

A backend is a module: a file in `backends/` and a line in `default_order.py`, or a module of
another package that an entry point names (group `vllm.kernel_backends`), or an object of a file
that `--kernel` names (`own_backend.py`). Importing it needs the standard library only; what it is
built on is imported when its kernels are made. A backend is named `provider` or `provider-path`
(flashinfer-cutlass); its module or entry point is named after the provider.

The module has SPECS, a maker per family it has code for (`linear`, `moe`, `attention`, `kv_quant`,
`delta_rule`, `mamba2`), and optionally MAKES (formats that a maker takes, by backend and family or
by family) and BEFORE (by family, the built-in backend that it is preferred to; without it, it comes
last).
"""

import json
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from vllm.errors import ConfigError, did_you_mean
from vllm.kernels.default_order import DEFAULT_ORDER, DEVICE_ORDER
from vllm.kernels.select.decision import Decision
from vllm.kernels.select.known_bad import KnownBad, known_bad_of
from vllm.kernels.select.spec import KernelSpec
from vllm.machine import BUILD, Lib
from vllm.utils.dataclasses import replace
from vllm.utils.entry_points import extensions

ENTRY_POINTS = "vllm.kernel_backends"

FAMILIES = tuple(DEFAULT_ORDER)
# The flags of `vllm serve` and `vllm kernels explain`, by family.
FLAGS = {"linear": "--linear-backend", "moe": "--moe-backend", "attention": "--attention-backend"}


# What upstream calls attention backends, by `_bare`: our name, or "" where the selector chooses,
# because that library has no kernel here.
_UPSTREAM_NAMES = {
    "tritonattn": "triton", "tritonattnvllmv1": "triton", "tritonmla": "triton",
    "flashinfervllmv1": "flashinfer", "cpuattn": "cpu", "cpumla": "cpu", "torchsdpa": "torch",
    "flashattn": "", "flashattnvllmv1": "", "flexattention": "", "xformers": "", "treeattn": "",
    "flashattnmla": "", "flashmla": "", "cutlassmla": "", "flashinfermla": "",
    "flashattnmlasparse": "", "flashmlasparse": "", "flashinfermlasparse": "",
}  # fmt: skip
_AUTOMATIC = "auto"

_own: dict[str, tuple[Any, str]] = {}  # by provider, with which code it is


def register(provider: str, backend: Any, version: str) -> None:
    """Adds a backend to those of this process, last in order. version: which code it is."""
    _own[provider] = backend, version
    for cached in (backend_names, specs, built):
        cached.cache_clear()


def own_backends() -> list[tuple[str, str]]:
    """(family, backend) of those that were registered."""
    return [(spec.family, spec.backend) for backend, _ in _own.values() for spec in backend.SPECS]


def code_version(name: str) -> str:
    """Which code a backend of another package or of a file is; "" for one of this package."""
    provider = name.partition("-")[0]
    if provider in _own:
        return _own[provider][1]
    return _digest(provider) if provider in extensions(ENTRY_POINTS) else ""


@cache
def _digest(provider: str) -> str:
    """The file that defines a backend of another package, with a hash of its content."""
    import hashlib

    backend = extensions(ENTRY_POINTS)[provider]
    is_module = isinstance(backend, ModuleType)
    module = backend if is_module else sys.modules.get(getattr(backend, "__module__", ""))
    try:
        file = Path(str(getattr(module, "__file__", "")))
        return f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()[:8]}"
    except OSError:
        return ""


@cache
def backend_names(family: str, device_family: str = "") -> tuple[str, ...]:
    """In order of preference on the chips of a device family, "" for most; the values that the
    family's flag takes, the same on all."""
    names = list(DEVICE_ORDER.get((family, device_family), DEFAULT_ORDER[family]))
    own_objects = (backend for backend, _ in _own.values())
    for module in (*extensions(ENTRY_POINTS).values(), *own_objects):
        before = getattr(module, "BEFORE", {}).get(family)
        place = names.index(before) if before in names else len(names)
        own = (spec.backend for spec in module.SPECS if spec.family == family)
        names[place:place] = [name for name in dict.fromkeys(own) if name not in names]
    return tuple(names)


def backend(name: str) -> ModuleType:
    """The module of backend `name`."""
    provider = name.partition("-")[0]
    if provider in _own:
        return cast(ModuleType, _own[provider][0])
    found: ModuleType | None = extensions(ENTRY_POINTS).get(provider)
    return found or import_module(f"vllm.kernels.backends.{provider}")


def maker(decision: Decision, name: str | None = None) -> ModuleType:
    """The module that makes the kernel of a decision, or of the part `name` of a split."""
    if decision.is_emulated:
        return backend("emulation")
    return backend(name or decision.winner.backend)


@cache
def specs(family: str, device_family: str = "") -> tuple[KernelSpec, ...]:
    """Every kernel of the family, in the order of `backend_names`, with what is known of it."""
    return tuple(
        _with_evidence(spec)
        for name in backend_names(family, device_family)
        for spec in backend(name).SPECS
        if spec.backend == name and spec.family == family
    )


@cache
def _with_evidence(spec: KernelSpec) -> KernelSpec:
    return replace(spec, ran_on=spec.ran_on.union(_ran_on(spec)), known_bad=_known_bad(spec))


_EVIDENCE = Path(__file__).parent / "evidence"


@cache
def runs() -> dict[str, list[str]]:
    """By architecture the kernels whose results were compared there: `family/backend/format`."""
    runs = json.loads((_EVIDENCE / "ran_on.json").read_text())
    return {arch: run["kernels"] for arch, run in runs.items()}


def _ran_on(spec: KernelSpec) -> Iterable[str]:
    own = f"{spec.family}/{spec.backend}/"
    formats = spec.formats
    return (
        f"{arch}/{weight_format}"
        for arch, kernels in runs().items()
        for weight_format in formats
        if own + weight_format in kernels
    )


@cache
def every_known_bad() -> tuple[KnownBad, ...]:
    """Versions of libraries whose kernels are not to serve."""
    return tuple(known_bad_of(json.loads((_EVIDENCE / "known_bad.json").read_text())))


def _known_bad(spec: KernelSpec) -> tuple[KnownBad, ...]:
    return tuple(bad for bad in every_known_bad() if bad.lib in dict(spec.libs))


def spec_of(decision: Decision, name: str) -> KernelSpec | None:
    """Of the kernel of backend `name` for the format of this problem."""
    own = (spec for spec in specs(decision.problem.family) if spec.backend == name)
    return next((spec for spec in own if decision.problem.format in spec.formats), None)


def winning_specs(decision: Decision) -> list[KernelSpec]:
    """Of the chosen kernel, or of each part of a split."""
    return [spec for _, name in decision.parts if (spec := spec_of(decision, name)) is not None]


def weight_layout(decision: Decision) -> str:
    """The first layout of the weight that every chosen kernel takes."""
    taken = [spec.weight_layouts for spec in winning_specs(decision)]
    return next(layout for layout in taken[0] if all(layout in own for own in taken))


def has_code(spec: KernelSpec) -> bool:
    """Whether this build can run the kernel: its backend has a maker for the family, and for one of
    its formats where the maker takes only some."""
    module = backend(spec.backend)
    makes = getattr(module, "MAKES", {})
    made = makes.get(f"{spec.backend}/{spec.family}", makes.get(spec.family, spec.formats))
    return hasattr(module, spec.family) and not spec.formats.isdisjoint(made)


def all_specs() -> list[KernelSpec]:
    return [spec for family in FAMILIES for spec in specs(family)]


def used_libs() -> set[str]:
    """Libraries that a kernel with code in this build is made of."""
    return {name for spec in all_specs() if has_code(spec) for name, _ in spec.libs}


@cache
def built() -> Lib:
    """The kernels whose code is in this build, as the library `build`."""
    names = (
        f"{spec.family}/{spec.backend}/{weight_format}"
        for spec in all_specs()
        if has_code(spec)
        for weight_format in sorted(spec.formats)
    )
    return Lib(BUILD, archs=tuple(names))


def find_backend(family: str, name: str) -> str | None:
    """The backend meant by `name`; case and separators do not matter (DEEPGEMM, deep-gemm)."""
    wanted = _bare(name)
    found = (known for known in backend_names(family) if _bare(known) == wanted)
    return next(found, (family == "attention" and _UPSTREAM_NAMES.get(wanted)) or None)


def is_automatic(family: str, name: str) -> bool:
    """Whether it asks for no backend: `auto`, or upstream's name for attention of a library that
    has none here (FLASH_ATTN)."""
    wanted = _bare(name)
    return wanted == _AUTOMATIC or (family == "attention" and _UPSTREAM_NAMES.get(wanted) == "")


def check_backend_name(family: str, name: str, source: str) -> str:
    """The backend meant by `name`, or ConfigError naming `source` and what it accepts."""
    found = find_backend(family, name)
    if found is None:
        raise unknown_backend(f"{source} {name!r}", name, backend_names(family))
    return found


def unknown_backend(what: str, name: str, known: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"{what}: unknown backend {name!r}: it takes {', '.join(known)}{did_you_mean(name, known)}"
    )


def _bare(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
