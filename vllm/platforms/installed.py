"""Which chip this machine has, asked of the CUDA driver itself: no torch, no CUDA context."""

import ctypes

from vllm.kernels.spec import Device
from vllm.platforms.interface import DeviceCapability

# CUdevice_attribute values of the driver API
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76


def installed_device() -> Device:
    """The first visible GPU, or the CPU where there is none or no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Device("cpu")
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return Device("cpu")
    driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device)
    return Device("cuda", DeviceCapability(major.value, minor.value))
