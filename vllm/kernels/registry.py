"""The backends of each problem family, in default order of preference.

A new backend is a file in `backends/` and a line here. Importing a backend's module needs the
standard library only; what it is built on is imported when its kernels are made. A backend is
named `provider` or `provider-path` (flashinfer-cutlass); its module is named after the provider.
"""

from functools import cache
from importlib import import_module
from types import ModuleType

from vllm.errors import ConfigError, did_you_mean
from vllm.kernels.select.decision import Decision
from vllm.kernels.select.facts import BUILD, Lib
from vllm.kernels.select.spec import KernelSpec

ORDER: dict[str, tuple[str, ...]] = {
    "linear": (
        "deep_gemm",
        # Of scales of rows and tensors; there ours are faster for few tokens alone, by measurement.
        "scaled_mm",
        "cutlass",
        "skinny",
        "flashinfer-deepgemm",
        "triton",
        # Never run here: after ours of the same arithmetic, before those that do not quantise x.
        "flashinfer-cutlass",
        "flashinfer-trtllm",
        "marlin-w4a8",
        "marlin",
        "humming",
        "cpu",
        "torch",
        "emulation",
        "emulation-ue8m0",
    ),
    "moe": (
        "deep_gemm",
        "cutlass",
        "triton",
        "flashinfer-cutlass",
        "flashinfer-trtllm",
        "marlin-w4a8",
        "marlin",
        "cpu",
        "torch",
    ),
    # FlashInfer compiles for a minute at the first start (see `KernelSpec.compiles`).
    "attention": ("triton", "flashinfer", "cpu", "torch"),
    "kv_quant": ("rotary", "triton", "cpu", "torch"),
}
FAMILIES = tuple(ORDER)


def backend(name: str) -> ModuleType:
    """The module of backend `name`: its SPECS and a maker per family it has code for."""
    return import_module(f"vllm.kernels.backends.{name.partition('-')[0]}")


def maker(decision: Decision, name: str | None = None) -> ModuleType:
    """The module that makes the kernel of a decision, or of the part `name` of a split."""
    if decision.is_emulated:
        return backend("emulation")
    return backend(name or decision.winner.backend)


@cache
def specs(family: str) -> tuple[KernelSpec, ...]:
    """Every kernel of the family, in order of preference."""
    return tuple(
        spec
        for name in ORDER[family]
        for spec in backend(name).SPECS
        if spec.backend == name and spec.family == family
    )


def spec_of(decision: Decision, name: str) -> KernelSpec | None:
    """Of the kernel of backend `name` for the format of this problem."""
    own = (spec for spec in specs(decision.problem.family) if spec.backend == name)
    return next((spec for spec in own if decision.problem.format in spec.formats), None)


def winning_specs(decision: Decision) -> list[KernelSpec]:
    """Of the chosen kernel, or of each part of a split."""
    winner = decision.winner
    names = [name for _, name in winner.parts] or [winner.backend]
    return [spec for name in names if (spec := spec_of(decision, name)) is not None]


def backend_names(family: str) -> list[str]:
    """The values that the family's flag takes."""
    return list(ORDER[family])


def has_code(spec: KernelSpec) -> bool:
    """Whether this build can run the kernel: its backend has a maker for the family, and for one of
    its formats where the maker takes only some (the module's MAKES, by backend and family, or by
    family for all backends of the module)."""
    module = backend(spec.backend)
    makes = getattr(module, "MAKES", {})
    made = makes.get(f"{spec.backend}/{spec.family}", makes.get(spec.family, spec.formats))
    return hasattr(module, spec.family) and not spec.formats.isdisjoint(made)


def used_libs() -> set[str]:
    """Libraries that a kernel with code in this build is made of."""
    every = (spec for family in FAMILIES for spec in specs(family) if has_code(spec))
    return {name for spec in every for name, _ in spec.libs}


@cache
def built() -> Lib:
    """The kernels whose code is in this build, as the library `build`."""
    names = (
        f"{family}/{spec.backend}/{weight_format}"
        for family in FAMILIES
        for spec in specs(family)
        if has_code(spec)
        for weight_format in sorted(spec.formats)
    )
    return Lib(BUILD, archs=tuple(names))


def find_backend(family: str, name: str) -> str | None:
    """The backend meant by `name`; case and separators do not matter (DEEPGEMM, deep-gemm)."""
    wanted = _bare(name)
    return next((known for known in ORDER[family] if _bare(known) == wanted), None)


def check_backend_name(family: str, name: str, source: str) -> str:
    """The backend meant by `name`, or ConfigError naming `source` and what it accepts."""
    found = find_backend(family, name)
    if found is None:
        raise unknown_backend(f"{source} {name!r}", name, ORDER[family])
    return found


def unknown_backend(what: str, name: str, known: "tuple[str, ...] | list[str]") -> ConfigError:
    return ConfigError(
        f"{what}: unknown backend {name!r}: it takes {', '.join(known)}{did_you_mean(name, known)}"
    )


def _bare(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
