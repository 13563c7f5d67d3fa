"""GPU libraries of this machine: absent, broken (with its error), or a version.

Two levels. `installed_libs` reads package metadata and imports nothing: for explaining choices on
any machine. `working_libs` tries each library in a child process: it can install, import, and
fail, crash or hang at its first call. What is run there beyond the import is declared by the
backend's module (TRIALS). Trials that passed are remembered for the same files, torch and chip.
"""

import contextlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Collection
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from vllm import envs
from vllm.kernels import registry
from vllm.machine import NATIVE, Lib, Libs
from vllm.platforms import native
from vllm.platforms.installed import installed_device
from vllm.utils.dataclasses import replace
from vllm.utils.distributions import installed_version
from vllm.utils.files import locked, write_atomically
from vllm.utils.versions import version_key

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
TRIAL_SECONDS = 60.0
_MAX_REMEMBERED = 64
# Modules of FlashInfer that take too long to build at a first call, and what of
# `flashinfer.jit.fused_moe` makes them.
FLASHINFER_LARGE_MODULES = {
    f"fused_moe_{arch}": f"gen_cutlass_fused_moe_sm{arch}_module" for arch in (90, 100, 103, 120)
}
FLASHINFER_CACHE = "flashinfer"
"""Folder of its modules in VLLM_KERNEL_CACHE."""


class LibraryTrial(NamedTuple):
    """What a backend runs on the GPU to find out whether its library works; raises what goes wrong.

    run: gets the imported library and the architectures it carries. seconds: None for the usual.
    """

    run: Callable[[ModuleType, tuple[str, ...]], None]
    seconds: float | None = None


def installed_libs() -> Libs:
    """Libraries by package metadata. Imports nothing; a broken library looks installed."""
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
    """Libraries after a trial of each of `modules`; the others by package metadata."""
    installed = installed_libs().libs
    wanted = [lib.name for lib in installed if lib.name in modules]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor() as pool:  # each waits for a process
        tried = [state for state in pool.map(library_state, wanted) if state is not None]
    return Libs.of([*(lib for lib in installed if lib.name not in modules), *tried])


def native_lib() -> Lib | None:
    """Our own native library as its manifest describes it, without loading it: loading takes torch.

    It carries `kernel/architecture` for what was compiled for GPUs.
    """
    if not (native.LIBRARY_DIR / native.LIBRARY_NAME).exists():
        return None
    try:
        manifest, built = native.manifest(), native.gpu_archs()
    except native.NativeLibraryError as error:
        return Lib(NATIVE, broken=str(error))
    builds = tuple(f"{kernel}:{build}" for kernel, build in manifest.get("builds", {}).items())
    archs = tuple(f"{kernel}/{arch}" for kernel, own in built.items() for arch in own)
    return Lib(NATIVE, manifest["version"], archs, builds=builds)


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
    if key and key in passed_trials():
        return found
    version, broken = _try_in_child(module, found.archs)
    if broken:
        known = f"version {found.version}, " if found.version else ""
        return Lib(module, broken=known + broken)
    if key:
        remember_trial(key)
    return Lib(module, found.version or _public_version(version), found.archs)


def find_nvcc() -> str | None:
    """nvcc where libraries look for it, in their order."""
    homes = (envs.foreign("CUDA_HOME"), envs.foreign("CUDA_PATH"))
    places = [str(Path(home) / "bin" / "nvcc") for home in homes if home]
    places += [shutil.which("nvcc") or "", "/usr/local/cuda/bin/nvcc"]
    return next((place for place in places if place and os.access(place, os.X_OK)), None)


# ---------------------------------------------------------------- trials


def _try_in_child(module: str, archs: tuple[str, ...]) -> tuple[str, str]:
    """(its own version, why it does not work); one of them may be empty."""
    from vllm.platforms import child

    trial = _declared_trial(module)
    seconds = TRIAL_SECONDS if trial is None else trial.seconds or TRIAL_SECONDS
    try:
        function = "vllm.platforms.libraries:try_library"
        version, broken = child.run(function, module, archs, timeout=seconds)
        return version, broken
    except TimeoutError:
        return "", f"its trial did not end within {seconds:g} s"
    except child.ChildEndedError as error:
        return "", f"its trial {error}"


def try_library(module: str, archs: tuple[str, ...]) -> tuple[str, str]:
    """Runs in the child: imports the library and runs the trial that a backend declares for it."""
    try:
        library = import_module(module)
        trial = _declared_trial(module)
        if trial is not None and installed_device().kind == "cuda":
            trial.run(library, archs)
        return str(getattr(library, "__version__", "")), ""
    except Exception as error:  # whatever a foreign library raises makes it unusable
        return "", one_line(error)


def _declared_trial(library: str) -> LibraryTrial | None:
    """The entry for a library in TRIALS of a backend's module."""
    backends = {name for family in registry.FAMILIES for name in registry.backend_names(family)}
    declared = (getattr(registry.backend(name), "TRIALS", {}) for name in backends)
    return next((trials[library] for trials in declared if library in trials), None)


def _trial_key(lib: Lib) -> str:
    """Everything that a trial's result depends on; "" for a library without a version."""
    file = _module_file(lib.name)
    if not lib.version or file is None:
        return ""
    changed = file.stat().st_mtime_ns
    torch_version = _public_version(installed_version("torch"))
    found = f"{lib} at {file} of {changed}, torch {torch_version}, {installed_device()}"
    nvcc = find_nvcc()
    compiler = f"{nvcc} of {Path(nvcc).stat().st_mtime_ns}" if nvcc else "no nvcc"
    return f"{found}, {native_lib() or 'no native'}, {compiler}"


def remember_trial(key: str) -> None:
    """A folder that cannot be written is no error: the trial then runs again."""
    with _REMEMBERING, contextlib.suppress(OSError), locked(_trials_file()):
        text = json.dumps([*passed_trials(), key][-_MAX_REMEMBERED:], indent=0)
        write_atomically(_trials_file(), text.encode())


def passed_trials() -> list[str]:
    """Keys of the trials that passed on this machine."""
    try:
        found = json.loads(_trials_file().read_text())
    except (OSError, ValueError):
        return []
    return [key for key in found if isinstance(key, str)] if isinstance(found, list) else []


def _trials_file() -> Path:
    folder: Path = envs.VLLM_CACHE_ROOT
    return folder / "library_trials.json"


_REMEMBERING = threading.Lock()  # libraries are tried in several threads


# ---------------------------------------------------------------- what is installed


def _installed(module: str, distributions: tuple[str, ...]) -> Lib | None:
    file = _module_file(module)
    version = next(filter(None, map(installed_version, distributions)), "")
    if file is None and not version:
        return None
    archs = _ARCHS[module](file.parent, version) if file is not None and module in _ARCHS else ()
    return Lib(module, _public_version(version), archs)


def _module_file(module: str) -> Path | None:
    """The file that `import module` would run first: of a package its `__init__.py`, else the
    module itself. A bare folder of that name is no package."""
    try:
        spec = find_spec(module)
    except ValueError:  # imported already, by something that left no spec
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def _public_version(version: str) -> str:
    """`2.11.0+cu130` -> `2.11.0`: in a Lib's text, `+` begins an architecture."""
    return version.partition("+")[0]


def one_line(error: BaseException) -> str:
    """The error and what caused it: a library that does not load often says why only there."""
    text = " ".join(str(error).split())[:300]
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{line} <- {one_line(error.__cause__)}" if error.__cause__ is not None else line


def _deep_gemm_archs(folder: Path, version: str) -> tuple[str, ...]:
    """Architectures whose FP8 GEMM the package carries, and the revision of its source that the
    version names: `8b1392b` of 2.5.0+8b1392b.

    Its own kernels alone count: the CUTLASS headers beside them name sm120 in every version.
    """
    names = (path.name for path in folder.glob("include/deep_gemm/impls/*.cuh"))
    matches = (re.match(r"sm(\d+)_fp8.*gemm", name) for name in names)
    archs = (f"sm{number}" for number in sorted({int(m[1]) for m in matches if m}))
    return (*archs, *filter(None, (version.partition("+")[2],)))


def prebuilt_modules(package: Path, version: str) -> tuple[str, ...]:
    """Those of FLASHINFER_LARGE_MODULES that are built already. Imports nothing.

    They lie in the package flashinfer-jit-cache where that is installed, else in the folder
    `package` of the library itself or in our own cache.
    """
    jit_cache = find_spec("flashinfer_jit_cache")
    place, below = package / "data" / "aot", ""
    if jit_cache is not None and jit_cache.origin is not None:
        place, below = Path(jit_cache.origin).parent, "**/"
    elif not place.exists():
        place = envs.VLLM_KERNEL_CACHE / FLASHINFER_CACHE
        below = f"{_public_version(version)}/*/cached_ops/cuda*/"
    return tuple(
        name
        for name in FLASHINFER_LARGE_MODULES
        if any(file.stat().st_size for file in place.glob(f"{below}{name}/{name}.so"))
    )


def _torch_archs(folder: Path, version: str) -> tuple[str, ...]:
    """`fp8-block` where its `scaled_mm` takes scales of 128x128 blocks: cuBLASLt 12.9 or newer.
    PyPI's packages do not name their CUDA in the version."""
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        return ()
    cuda = re.search(r"^cuda\b[^=\n]*= *['\"]([\d.]+)", text, re.MULTILINE)
    return ("scaled-blocks",) if cuda and version_key(cuda[1]) >= (12, 9) else ()


_ARCHS: dict[str, Callable[[Path, str], tuple[str, ...]]] = {
    "deep_gemm": _deep_gemm_archs,
    "flashinfer": prebuilt_modules,
    "torch": _torch_archs,
}
