"""Builds of FlashInfer's modules with nvcc and ninja: cached and monitored.

    python -m vllm.kernels.jit.flashinfer fused_moe_90

builds a large module into VLLM_KERNEL_CACHE ahead of the first call. On another chip set
FLASHINFER_CUDA_ARCH_LIST, for example to 9.0a. MAX_JOBS limits the number of compilers.
"""

import contextlib
import sys
import time
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.errors import ConfigError
from vllm.kernels.jit.caches import FLASHINFER, cache_root, use_caches
from vllm.kernels.jit.monitor import MONITOR, Compilation
from vllm.platforms.libraries import FLASHINFER_LARGE_MODULES, find_nvcc
from vllm.utils.files import write_atomically
from vllm.utils.heartbeat import PULSE, Activity


@cache
def watch_flashinfer() -> None:
    """Call it before any function of FlashInfer. It turns downloads off, unless FlashInfer's own
    variable is set.

    A built module is copied to the folder of prebuilt modules: FlashInfer loads one from its build
    folder only after ninja has checked all sources, which takes seconds. An installed package of
    prebuilt modules takes precedence.
    """
    # It runs the second for its FP8 block products, and looks for none.
    variables = {"FLASHINFER_NO_DOWNLOAD": "1", "TRTLLM_DG_NVCC_COMPILER": find_nvcc()}
    for name, value in variables.items():
        if value and envs.foreign(name) is None:
            envs.set_for_children(name, value)
    env: Any = import_module("flashinfer.jit.env")
    core: Any = import_module("flashinfer.jit.core")
    if not env.FLASHINFER_AOT_DIR.exists():
        # Its name has the version and the chip; the CUDA runtime it is linked with, ninja looks at.
        kind = env.FLASHINFER_JIT_DIR.relative_to(env.FLASHINFER_CACHE_DIR)
        cuda: Any = import_module("flashinfer.jit.cpp_ext").get_cuda_version()
        env.FLASHINFER_AOT_DIR = cache_root() / FLASHINFER / kind / f"cuda{cuda.major}"
    build = core.JitSpec.build

    def watched(self: Any, *arguments: Any, **options: Any) -> None:
        before, begin = _changed_at(self.jit_library_path), time.perf_counter()
        with PULSE.during(Activity.COMPILE):
            build(self, *arguments, **options)
        if _changed_at(self.jit_library_path) != before:
            seconds = time.perf_counter() - begin
            MONITOR.note(Compilation("flashinfer", self.name, seconds))
        if self.jit_library_path.exists() and not self.aot_path.exists():
            with contextlib.suppress(OSError):  # the module serves without a copy
                write_atomically(self.aot_path, self.jit_library_path.read_bytes(), mode=0o755)

    core.JitSpec.build = watched


def _changed_at(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


# ---------------------------------------------------------------- large modules


def check_large_module(name: str) -> None:
    """ConfigError if the first call would build it: a module found by name may be built for another
    CUDA version or other chips."""
    spec = _spec_of(name)
    if not spec.is_aot:
        raise ConfigError(
            f"flashinfer's {name} is here, but not as {spec.aot_path}, of this CUDA and for these "
            f"chips, where it is looked for: python -m vllm.kernels.jit.flashinfer {name} builds "
            f"it, or choose another --moe-backend"
        )


def copy_large_modules(root: Path) -> None:
    """Copies the large modules to another VLLM_KERNEL_CACHE."""
    kept: Path = envs.VLLM_KERNEL_CACHE / FLASHINFER
    for name in FLASHINFER_LARGE_MODULES:
        for file in kept.glob(f"**/{name}/{name}.so"):
            place = root / FLASHINFER / file.relative_to(kept)
            write_atomically(place, file.read_bytes(), mode=0o755)


def _spec_of(name: str) -> Any:
    """FlashInfer's description of a large module: where it lies and how it is built."""
    return getattr(import_module("flashinfer.jit.fused_moe"), FLASHINFER_LARGE_MODULES[name])()


def build_module(name: str) -> Path:
    """Builds one of FLASHINFER_LARGE_MODULES unless it is built; returns its file."""
    if name not in FLASHINFER_LARGE_MODULES:
        raise ConfigError(f"no module {name!r}: it takes {', '.join(FLASHINFER_LARGE_MODULES)}")
    if find_spec("flashinfer") is None:
        raise ConfigError("flashinfer is not installed here: pip install flashinfer-python")
    use_caches()
    watch_flashinfer()
    spec = _spec_of(name)
    if not spec.is_aot:
        spec.build(verbose=True)
    path: Path = spec.get_library_path()
    return path


if __name__ == "__main__":
    try:
        for module in sys.argv[1:] or sys.exit(__doc__):
            print(build_module(module))
    except ConfigError as error:
        sys.exit(str(error))
    except (ImportError, OSError, RuntimeError) as error:  # no library, ninja, nvcc or chip
        sys.exit(f"{' '.join(sys.argv[1:])} cannot be built here: {type(error).__name__}: {error}")
