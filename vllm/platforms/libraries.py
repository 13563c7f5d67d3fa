"""The GPU libraries a machine may have: absent, broken (with its own error), or which version.

Two levels. `installed_libs` reads package metadata and imports nothing: for explaining choices on
any machine. `working_libs` tries each library in a process of its own (`trial.py`): it can install,
import, and fail, fault or hang at its first call.
"""

import re
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from vllm.kernels.jit.flashinfer import prebuilt_modules
from vllm.kernels.jit.nvcc_cache import find_nvcc
from vllm.machine import NATIVE, Device, DeviceCapability, Lib, Libs
from vllm.platforms import native, trial
from vllm.platforms.installed import installed_device

# Module, which is also our name for the library -> distributions that install it.
DISTRIBUTIONS: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "triton": ("triton",),
    "deep_gemm": ("sgl-deep-gemm", "deep-gemm"),
    "flashinfer": ("flashinfer-python",),
    "flashinfer_cubin": ("flashinfer-cubin",),  # its binaries, which it would download otherwise
    "fla": ("flash-linear-attention", "fla-core"),
    "humming": ("humming-kernels",),
}


def installed_libs() -> Libs:
    """What package metadata says is here. Imports nothing; a broken library looks installed."""
    every = (_installed(module, names) for module, names in DISTRIBUTIONS.items())
    found = {lib.name: lib for lib in every if lib is not None}
    own, binaries = found.get("flashinfer"), found.get("flashinfer_cubin")
    if own is not None and binaries is not None and own.version != binaries.version:
        text = (
            f"flashinfer-python {own.version} refuses flashinfer-cubin {binaries.version} beside "
            f"it: install equal versions, or only the first"
        )
        found |= {lib.name: replace(lib, broken=text) for lib in (own, binaries)}
    return Libs.of([*found.values()])


def working_libs(modules: Collection[str] = tuple(DISTRIBUTIONS)) -> Libs:
    """What works here, found by trying each of `modules`; the others are as installed."""
    installed = installed_libs().libs
    with ThreadPoolExecutor() as pool:  # each waits for a process
        tried = list(
            pool.map(library_state, [lib.name for lib in installed if lib.name in modules])
        )
    others = [lib for lib in installed if lib.name not in modules]
    return Libs.of([*others, *(state for state in tried if state is not None)])


def native_lib() -> Lib | None:
    """Our own native library as its manifest describes it, without loading it: loading takes torch.

    It carries `kernel/architecture` for what was compiled for GPUs.
    """
    if not (native.LIBRARY_DIR / native.LIBRARY_NAME).exists():
        return None
    try:
        version = native.manifest()["version"]
        built, builds = native.gpu_archs(), native.build_ids()
    except native.NativeLibraryError as error:
        return Lib(NATIVE, broken=str(error))
    archs = tuple(f"{kernel}/{arch}" for kernel, own in built.items() for arch in own)
    return Lib(NATIVE, version, archs, builds=builds)


def is_usable(module: str) -> bool:
    """Whether the library imports and passes its trial."""
    lib = library_state(module)
    return lib is not None and not lib.broken


@cache
def library_state(module: str, distributions: tuple[str, ...] | None = None) -> Lib | None:
    """The library that imports as `module`: None where it is absent, else its version and the
    architectures it carries, or the error that makes it unusable.

    distributions: names it may be installed under; None for those in DISTRIBUTIONS. It is imported
    and tried in another process, once; nothing is imported here.
    """
    found = _installed(module, DISTRIBUTIONS[module] if distributions is None else distributions)
    if found is None:
        return None
    key = _trial_key(found)
    if key and trial.remembers(key):
        return found
    result = trial.try_library(module, found.archs, _TRIAL_SECONDS.get(module))
    if "broken" in result:
        version = f"version {found.version}, " if found.version else ""
        return Lib(module, broken=f"{version}{result['broken']}")
    if key:
        trial.remember(key)
    return Lib(module, found.version or _public_version(result["version"]), found.archs)


def _trial_key(lib: Lib) -> str:
    """What a trial's result depends on; "" where a library does not say its version."""
    file = _module_file(lib.name)
    if not lib.version or file is None:
        return ""
    changed = file.stat().st_mtime_ns
    torch_version = _distribution_version("torch")
    found = f"{lib} at {file} of {changed}, torch {torch_version}, {installed_device()}"
    return f"{found}, {native_lib() or 'no native'}, {_compiler()}"


def _compiler() -> str:
    """The nvcc that libraries compile with at run time: one that is replaced has its date."""
    found = find_nvcc()
    return f"{found} of {Path(found).stat().st_mtime_ns}" if found else "no nvcc"


def _installed(module: str, distributions: tuple[str, ...]) -> Lib | None:
    file = _module_file(module)
    version = next(filter(None, map(_distribution_version, distributions)), "")
    if file is None and not version:
        return None
    archs = _ARCHS[module](file.parent) if file is not None and module in _ARCHS else ()
    return Lib(module, version, archs)


def _module_file(module: str) -> Path | None:
    """The file that `import module` would run first: of a package its `__init__.py`, else the
    module itself. A bare folder of that name is no package."""
    try:
        spec = find_spec(module)
    except ValueError:  # imported already, by something that left no spec
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def _distribution_version(name: str) -> str:
    try:
        return _public_version(metadata.version(name))
    except metadata.PackageNotFoundError:
        return ""


def _public_version(version: str) -> str:
    """`2.11.0+cu130` -> `2.11.0`: in a Lib's text, `+` begins an architecture."""
    return version.partition("+")[0]


def one_line(error: BaseException) -> str:
    """The error and what caused it: a library that does not load often says why only there."""
    text = " ".join(str(error).split())[:300]
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{line} <- {one_line(error.__cause__)}" if error.__cause__ is not None else line


# ---------------------------------------------------------------- DeepGEMM


def _deep_gemm_archs(folder: Path) -> tuple[str, ...]:
    """Architectures whose FP8 GEMM the package carries.

    Its own kernels alone count: the CUTLASS headers beside them name sm120 in every version.
    """
    names = (path.name for path in folder.glob("include/deep_gemm/impls/*.cuh"))
    matches = (re.match(r"sm(\d+)_fp8.*gemm", name) for name in names)
    return tuple(f"sm{number}" for number in sorted({int(m[1]) for m in matches if m}))


def _try_deep_gemm(deep_gemm: ModuleType, archs: tuple[str, ...]) -> None:
    """Lays scales out on the GPU and compares with our own layout; raises what goes wrong.

    Builds against another torch import and then fail right here ("dim == 2 or dim == 3"), and so
    does a machine without nvcc, which the library compiles its kernels with.
    """
    if installed_device().kind == "cpu":
        return
    import torch

    from vllm.utils.deep_gemm import transform_sf_into_required_layout

    device = Device("cuda", DeviceCapability(*torch.cuda.get_device_capability()))
    has_kernels = device.arch == "sm_90" or device.family == "sm_10x"
    if not has_kernels and not (device.family == "sm_12x" and "sm120" in archs):
        return
    num_rows, num_groups = 6, 8
    exponents = 100 + torch.arange(num_rows * num_groups, dtype=torch.int32, device="cuda")
    scales = (exponents << 23).view(torch.float32).view(num_rows, num_groups)  # powers of two
    sizes = (num_rows, num_groups * 128, (1, 128, 128))
    theirs = deep_gemm.transform_sf_into_required_layout(scales, *sizes, None, True)
    ours = transform_sf_into_required_layout(scales, *sizes, None, True, arch=device)
    if theirs.stride() != ours.stride() or not torch.equal(theirs, ours):
        raise RuntimeError(f"its layout of scales on {device} is not the documented one")


# ---------------------------------------------------------------- FlashInfer


def _flashinfer_modules(folder: Path) -> tuple[str, ...]:
    return prebuilt_modules(folder, _distribution_version(*DISTRIBUTIONS["flashinfer"]))


# ---------------------------------------------------------------- humming


def _try_humming(humming: ModuleType, archs: tuple[str, ...]) -> None:
    """Compiles and compares one product on the GPU; raises what goes wrong.

    Without nvcc a product may still come from the library's cache, and the next size would fail.
    """
    if installed_device().kind == "cpu":
        return
    if find_nvcc() is None:
        raise RuntimeError("it compiles with nvcc, which is not here: put it on PATH or CUDA_HOME")
    from vllm.kernels.backends.humming import try_product

    try_product()


_ARCHS: dict[str, Callable[[Path], tuple[str, ...]]] = {
    "deep_gemm": _deep_gemm_archs,
    "flashinfer": _flashinfer_modules,
}
TRIALS: dict[str, Callable[[ModuleType, tuple[str, ...]], None]] = {
    "deep_gemm": _try_deep_gemm,
    "humming": _try_humming,
}
# Of libraries whose first product compiles for longer than trials usually take.
_TRIAL_SECONDS = {"humming": 240.0}
