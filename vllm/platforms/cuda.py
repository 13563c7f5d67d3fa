"""The CUDA platform: capability of the current device, as torch reports it."""

from functools import cache

import torch

from vllm.platforms.interface import DeviceCapability, Platform


class CudaPlatform(Platform):
    device_type = "cuda"

    def get_device_capability(self) -> DeviceCapability | None:
        return _capability(torch.cuda.current_device())


@cache
def _capability(index: int) -> DeviceCapability:
    return DeviceCapability(*torch.cuda.get_device_capability(index))
