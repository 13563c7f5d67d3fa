"""What of a start needs neither torch nor the interpreter, done while modules are imported.

Each job is a thread that waits in the driver, for the disk or for another process. None imports
what the main thread may be importing: two threads that import parts of torch at once can see each
other's half-made modules.
"""

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from vllm.kernels import registry
from vllm.kernels.jit.caches import use_caches
from vllm.platforms.cpu import available_memory
from vllm.platforms.installed import installed_device
from vllm.platforms.libraries import working_libs
from vllm.utils.hub import local_model

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

_CHUNK_BYTES = 32 << 20

_awaited: list[Thread] = []


def begin(args: "EngineArgs", data_parallel_rank: int = 0) -> None:
    """Starts the jobs for an engine of these arguments. What fails in one fails again where it is
    needed, and is told there."""
    if args.load_format != "dummy":
        _start(_read_model_ahead, args.model, args.revision)
    is_one_rank = args.tensor_parallel_size == args.pipeline_parallel_size == 1
    if is_one_rank and args.distributed_executor_backend in (None, "uni"):
        _awaited.append(_start(wake_gpu, data_parallel_rank))
        if installed_device().kind == "cuda":
            # What a trial compiles is kept where the engine looks for it. Here, because it sets
            # variables, which no thread may do while another reads them.
            with contextlib.suppress(Exception):
                use_caches()
            _awaited.append(_start(_try_libraries))


def begin_rank() -> None:
    """The same in the process of one rank of several, which does not know its GPU yet."""
    _start(wake_gpu, None)


def finish() -> None:
    """Waits for the jobs that the engine would do again: all but reading ahead."""
    while _awaited:
        _awaited.pop().join()


def _start(job: Callable[..., None], *arguments: object) -> Thread:
    def run() -> None:
        with contextlib.suppress(Exception):  # told where it fails again
            job(*arguments)

    thread = Thread(target=run, name=f"start-{job.__name__}", daemon=True)
    thread.start()
    return thread


def wake_gpu(index: int | None) -> None:
    """Starts the driver, and makes the context on GPU `index` that torch will use.

    On a host with many GPUs that takes seconds, in which the interpreter is free. Nothing happens
    where there is no driver or no such GPU.
    """
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
    """Their trials, in processes of their own, whose results are kept."""
    working_libs(registry.used_libs())


def _read_model_ahead(model: str, revision: str | None) -> None:
    if (folder := local_model(model, revision)) is not None:
        read_ahead(folder)


def read_ahead(folder: Path) -> None:
    """Brings weights from the disk into the page cache, as far as half of the free memory holds
    them. What is there already costs next to nothing."""
    left = available_memory() // 2
    buffer = mmap.mmap(-1, _CHUNK_BYTES)
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with open(file, "rb", buffering=0) as opened:
                size = os.fstat(opened.fileno()).st_size
                for offset in range(0, min(size, left), _CHUNK_BYTES):
                    last = min(offset + _CHUNK_BYTES, size) - 1
                    if not _is_cached(opened.fileno(), last):
                        os.preadv(opened.fileno(), [buffer], offset)
        except OSError:  # loading says what is wrong with it
            return
        left -= size


def _is_cached(descriptor: int, offset: int) -> bool:
    """Whether the byte at `offset` is in memory. False as well where the file system cannot tell.
    Linux may begin to read around a byte that is not."""
    try:
        return bool(os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT))
    except (OSError, AttributeError):
        return False
