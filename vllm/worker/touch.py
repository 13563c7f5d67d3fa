"""Takes the pages of a cache from the system before requests need them."""

import ctypes
import mmap
import sys
import weakref
from collections.abc import Iterable, Sequence
from threading import Thread

from torch import Tensor

from vllm.logger import get_logger
from vllm.platforms.cpu import available_memory
from vllm.utils.math_utils import round_up

logger = get_logger(__name__)

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14: content stays as it is
_CHUNK_BYTES = 64 << 20
# What is left to the rest of the machine: to take the last page of a cgroup kills a process.
_LEAST_LEFT = 256 << 20


def touch_in_background(tensors: Iterable[Tensor]) -> Thread:
    """Takes memory for `tensors` of the CPU, whose pages come at their first use otherwise: a
    server that grows under load makes the system kill something else. Meanwhile they may be used;
    where memory runs out the rest stays untouched, with a warning. The start does not wait."""
    found = [weakref.ref(tensor) for tensor in tensors]  # an engine that ends is not kept
    thread = Thread(target=_touch, args=(found,), name="touch-cache", daemon=True)
    thread.start()
    return thread


def _touch(tensors: "Sequence[weakref.ref[Tensor]]") -> None:
    done = 0
    for reference in tensors:
        offset = 0
        while (tensor := reference()) is not None and offset < tensor.nbytes:
            size = min(_CHUNK_BYTES, tensor.nbytes - offset)
            if available_memory() < size + _LEAST_LEFT:
                _warn(done, tensors)
                return
            if not _populate(tensor.data_ptr() + offset, size):
                return  # an older kernel: pages come at their first use
            offset += size
            done += size
            del tensor


def _populate(address: int, size: int) -> bool:
    """Without the GIL. The pages at both ends may be shared with a neighbour: all are zeros."""
    if sys.platform != "linux":
        return False
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = round_up(address + size - start, mmap.PAGESIZE)
    libc = ctypes.CDLL(None)
    return bool(libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _POPULATE_WRITE) == 0)


def _warn(done: int, tensors: "Sequence[weakref.ref[Tensor]]") -> None:
    total = sum(t.nbytes for reference in tensors if (t := reference()) is not None)
    logger.warning(
        "Memory holds only %.2f of %.2f GiB of the KV cache: others took it since the start. Lower "
        "VLLM_CPU_KVCACHE_SPACE (GiB) or --kv-cache-memory-bytes, or end what else runs",
        done / (1 << 30), total / (1 << 30),
    )  # fmt: skip
