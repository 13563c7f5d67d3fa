"""Prefetch at start-up: jobs that need neither torch nor the GIL, run while modules are imported.

Each job is a thread that waits for the driver, the disk or another process. No job imports torch:
two threads that import parts of torch at once can see each other's half-initialised modules.
"""

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from threading import Thread

from vllm.kernels import registry
from vllm.kernels.jit.caches import use_caches
from vllm.platforms.cpu import available_memory
from vllm.platforms.installed import installed_device
from vllm.platforms.libraries import working_libs
from vllm.utils.files import is_regular
from vllm.utils.hub import local_model

_CHUNK_BYTES = 32 << 20

_awaited: list[Thread] = []


def read_model_ahead(model: str, revision: str | None) -> None:
    """Starts to read the weights. A job that fails fails again where its result is needed, and is
    reported there."""
    _start(_read_model_ahead, model, revision)


def begin_engine(gpu: int) -> None:
    """Starts the jobs of an engine with one rank, on GPU `gpu`."""
    _awaited.append(_start(wake_gpu, gpu))
    if installed_device().kind == "cuda":
        # Sets environment variables, so not in a thread. Trials compile into the engine's caches.
        with contextlib.suppress(Exception):
            use_caches()
        _awaited.append(_start(_try_libraries))


def begin_rank() -> None:
    """Starts the jobs of one rank of several, which does not know its GPU yet."""
    _start(wake_gpu, None)


def finish() -> None:
    """Waits for the jobs that the engine would repeat: all but reading ahead."""
    while _awaited:
        _awaited.pop().join()


def _start(job: Callable[..., None], *arguments: object) -> Thread:
    def run() -> None:
        with contextlib.suppress(Exception):  # reported where it fails again
            job(*arguments)

    thread = Thread(target=run, name=f"start-{job.__name__}", daemon=True)
    thread.start()
    return thread


def wake_gpu(index: int | None) -> None:
    """Initialises the driver and the context on GPU `index` that torch will use; nothing where
    there is no driver or no such GPU. Takes seconds on a host with many GPUs, without the GIL."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or index is None or driver.cuDeviceGet(ctypes.byref(device), index):
        return
    # Kept until the process ends, as torch keeps it.
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _try_libraries() -> None:
    """Runs the libraries' trials in child processes; the results are cached."""
    working_libs(registry.used_libs())


def _read_model_ahead(model: str, revision: str | None) -> None:
    if (folder := local_model(model, revision)) is not None:
        read_ahead(folder)


def read_ahead(folder: Path) -> None:
    """Reads weights from disk into the page cache, up to half of the free memory. Cached parts
    cost almost nothing."""
    left = available_memory() // 2
    buffer = mmap.mmap(-1, _CHUNK_BYTES)
    for file in filter(is_regular, sorted(folder.glob("*.safetensors"))):
        try:
            with open(file, "rb", buffering=0) as opened:
                size = os.fstat(opened.fileno()).st_size
                for offset in range(0, min(size, left), _CHUNK_BYTES):
                    last = min(offset + _CHUNK_BYTES, size) - 1
                    if not _is_cached(opened.fileno(), last):
                        os.preadv(opened.fileno(), [buffer], offset)
        except OSError:  # the loader reports it
            return
        left -= size


def _is_cached(descriptor: int, offset: int) -> bool:
    """Whether the byte at `offset` is in memory; False where the file system cannot tell. Linux
    may start to read around a byte that is not."""
    try:
        return bool(os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT))
    except (OSError, AttributeError):
        return False
