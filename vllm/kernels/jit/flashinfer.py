"""FlashInfer's modules, which it builds with nvcc and ninja: kept, shared, and watched."""

import contextlib
import time
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from vllm.kernels.jit.caches import flashinfer_modules
from vllm.kernels.jit.monitor import MONITOR, Compilation
from vllm.kernels.jit.nvcc import write_whole


@cache
def watch_flashinfer() -> None:
    """To be called before a function of FlashInfer is.

    A module that was built is copied to where FlashInfer looks for prebuilt ones: from its own
    folder it takes one only after ninja has looked at all sources, which takes seconds. Where a
    package with prebuilt modules is installed, they are used instead.
    """
    env: Any = import_module("flashinfer.jit.env")
    core: Any = import_module("flashinfer.jit.core")
    if not env.FLASHINFER_AOT_DIR.exists():
        # Its name has the version and the chip; the CUDA runtime it is linked with, ninja looks at.
        kind = env.FLASHINFER_JIT_DIR.relative_to(env.FLASHINFER_CACHE_DIR)
        cuda: Any = import_module("flashinfer.jit.cpp_ext").get_cuda_version()
        env.FLASHINFER_AOT_DIR = flashinfer_modules() / kind / f"cuda{cuda.major}"
    build = core.JitSpec.build

    def watched(self: Any, *arguments: Any, **options: Any) -> None:
        before, begin = _changed_at(self.jit_library_path), time.perf_counter()
        build(self, *arguments, **options)
        if _changed_at(self.jit_library_path) != before:
            seconds = time.perf_counter() - begin
            MONITOR.note(Compilation("flashinfer", self.name, seconds))
        _publish(self.jit_library_path, self.aot_path)

    core.JitSpec.build = watched


def _changed_at(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _publish(built: Path, place: Path) -> None:
    if built.exists() and not place.exists():
        with contextlib.suppress(OSError):  # the module serves without a copy
            write_whole(place, built.read_bytes(), mode=0o755)
