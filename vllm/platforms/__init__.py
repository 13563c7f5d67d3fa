"""`current_platform`: the device this process runs on, found at first use."""

from functools import cache
from typing import TYPE_CHECKING, Any

from vllm.machine import DeviceCapability
from vllm.platforms.interface import Platform

if TYPE_CHECKING:
    current_platform: Platform

__all__ = ["DeviceCapability", "Platform", "current_platform"]


@cache
def _current_platform() -> Platform:
    import torch

    if torch.cuda.is_available():
        from vllm.platforms.cuda import CudaPlatform

        return CudaPlatform()
    from vllm.platforms.cpu import CpuPlatform

    return CpuPlatform()


def __getattr__(name: str) -> Any:
    if name == "current_platform":
        return _current_platform()
    raise AttributeError(f"module 'vllm.platforms' has no attribute {name!r}")
