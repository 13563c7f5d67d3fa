"""Which chip this machine has, asked of the CUDA driver itself: no torch, no CUDA context."""

import ctypes

from vllm.kernels.spec import Device
from vllm.platforms.cpu import num_cores
from vllm.platforms.interface import DeviceCapability

# CUdevice_attribute values of the driver API
_NUM_SMS, _CAPABILITY_MAJOR, _CAPABILITY_MINOR = 16, 75, 76


def installed_device() -> Device:
    """The first visible GPU, or the CPU where there is none or no driver."""
    found = _attributes(_CAPABILITY_MAJOR, _CAPABILITY_MINOR)
    return Device("cuda", DeviceCapability(*found)) if found else Device("cpu")


def installed_num_sms() -> int:
    """Multiprocessors of that device; of a CPU the cores that this process may use."""
    found = _attributes(_NUM_SMS)
    return found[0] if found else num_cores()


def _attributes(*numbers: int) -> list[int]:
    """Of the first visible GPU; [] where there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    device = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return []
    values = []
    for number in numbers:
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        values.append(value.value)
    return values
