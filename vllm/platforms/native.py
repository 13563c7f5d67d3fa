"""The native kernel library: where it is, whether it works, and how to get it.

`vllm/lib/libvllm_kernels.so` and `vllm/lib/arch_manifest.json` are written by the CMake build.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vllm import envs
from vllm.utils.dataclasses import dataclass

if TYPE_CHECKING:
    from collections.abc import Collection

    import tvm_ffi

LIBRARY_DIR = Path(__file__).parents[1] / "lib"
LIBRARY_NAME = "libvllm_kernels.so"
MANIFEST_NAME = "arch_manifest.json"
_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
# What csrc/cpu/dispatch.cpp asks the chip for, the fastest first.
_ISA_FLAGS = {
    "avx512_bf16": {*_AVX512, "avx512_bf16", "avx512vbmi"},
    "avx512": _AVX512,
    "avx2": {"avx2", "fma", "f16c"},
    "portable": set[str](),
}
_BUILD_HINT = "run `make build`, or `pip install .` with a C++ compiler"


class NativeLibraryError(RuntimeError):
    """The native library is absent or does not load; the message says why and what to do."""


@dataclass(frozen=True)
class NativeStatus:
    """Whether the native library can be used here, and a sentence about it."""

    state: Literal["present", "absent", "broken"]
    text: str


def load(isa: str | None = None) -> tvm_ffi.Module:
    """The library, loaded once per process.

    `isa` ("avx512_bf16", "avx512", "avx2" or "portable") changes which CPU kernels run from now
    on; None leaves the choice made at load, the fastest that the chip executes.

    Raises NativeLibraryError if the library is absent or does not load, ValueError for an
    instruction set that this build or chip lacks.
    """
    library = _load()
    if isa is not None:
        library.cpu_set_isa(isa)
    return library


@functools.cache
def function(name: str) -> Any:
    """The library's function of that name; None where there is no library, or one without it."""
    if not (LIBRARY_DIR / LIBRARY_NAME).exists():
        return None
    return getattr(load(), name, None)


def status() -> NativeStatus:
    """What `load` would find. Never raises."""
    path = LIBRARY_DIR / LIBRARY_NAME
    if not path.exists():
        return NativeStatus("absent", f"{path} is not built: {_BUILD_HINT}")
    try:
        built = manifest()
        isa = load().cpu_isa()
    except (NativeLibraryError, OSError, AttributeError) as error:
        return NativeStatus("broken", str(error))
    return NativeStatus("present", f"{built['version']} ({built['compiler']}), running {isa}")


@functools.cache
def manifest() -> dict[str, Any]:
    """What the library was built with.

    `kernels` maps each kernel to the instruction sets or GPU architectures it was compiled for;
    `version`, `compiler`, `cuda` (None without nvcc) and `processor` are strings; `skipped` lists
    what was asked for and not built, as {kernel, arch, reason} with kernel `*` for every one;
    `builds` maps each kernel to a hash of the sources and flags that it was built from.

    Raises NativeLibraryError if the file is missing or not what the build writes.
    """
    path = LIBRARY_DIR / MANIFEST_NAME
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise NativeLibraryError(f"cannot read {path} ({error}): {_BUILD_HINT}") from error
    if not isinstance(content, dict) or not {"version", "compiler", "kernels"} <= content.keys():
        raise NativeLibraryError(f"{path} lacks version, compiler or kernels: {_BUILD_HINT}")
    return content


def cpu_isa(flags: Collection[str]) -> str:
    """The instruction set that the CPU kernels run on a chip with these flags, found out without
    loading them; "" where there are none."""
    if not (LIBRARY_DIR / LIBRARY_NAME).exists():
        return ""
    try:
        built = manifest()["kernels"].get("cpu_linear", ())
    except NativeLibraryError:
        return ""
    usable = (isa for isa, needed in _ISA_FLAGS.items() if isa in built and needed <= {*flags})
    return envs.VLLM_CPU_ISA or next(usable, "")


def gpu_archs() -> dict[str, tuple[str, ...]]:
    """What each GPU kernel was built for: `90a` is machine code, `compute_90` is PTX.

    Empty for a library without GPU kernels. Raises NativeLibraryError as `manifest` does.
    """
    is_arch = re.compile(r"(compute_)?\d+[af]?").fullmatch
    return {
        kernel: tuple(built_for)
        for kernel, built_for in manifest()["kernels"].items()
        if all(map(is_arch, built_for))
    }


@functools.cache
def _load() -> tvm_ffi.Module:
    import torch
    import tvm_ffi

    path = LIBRARY_DIR / LIBRARY_NAME
    if not path.exists():
        raise NativeLibraryError(f"{path} is not built: {_BUILD_HINT}")
    try:
        library = tvm_ffi.load_module(str(path))
        library.cpu_set_num_threads(torch.get_num_threads())
    except Exception as error:  # tvm_ffi raises RuntimeError or OSError by version
        raise NativeLibraryError(f"{path} does not load ({error}): {_BUILD_HINT}") from error
    return library
