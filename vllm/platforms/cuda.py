"""The CUDA platform: capability and memory of the current device, as torch reports them."""

from dataclasses import dataclass
from functools import cache

import torch

from vllm.machine import DeviceCapability
from vllm.platforms.interface import Platform

# The CUDA context and the libraries' own workspaces, which torch's allocator does not count.
_CONTEXT_BYTES = (1 << 30) * 3 // 4


class CudaPlatform(Platform):
    device_type = "cuda"

    def get_device_capability(self) -> DeviceCapability | None:
        return _capability(torch.cuda.current_device())


@cache
def _capability(index: int) -> DeviceCapability:
    return DeviceCapability(*torch.cuda.get_device_capability(index))


@dataclass(frozen=True)
class GpuMemory:
    """Bytes. own: of this process. left: what it may still take of its share, and can."""

    total: int
    free: int
    own: int
    left: int


def gpu_memory(share: float) -> GpuMemory:
    """share: of the whole GPU, for this engine, whatever others use of it."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    own = torch.cuda.memory_reserved() + _CONTEXT_BYTES
    return GpuMemory(total, free, own, min(int(total * share) - own, free))
