"""Which chip this machine has, asked of the CUDA driver itself: no torch, no CUDA context."""

import ctypes

from vllm.kernels.spec import Device
from vllm.kernels.tune_table import Chip
from vllm.platforms.cpu import num_cores
from vllm.platforms.interface import DeviceCapability

# CUdevice_attribute values of the driver API; the clock is in kHz, the width of the bus in bits.
_NUM_SMS, _CAPABILITY_MAJOR, _CAPABILITY_MINOR = 16, 75, 76
_MEMORY_CLOCK, _MEMORY_BUS_WIDTH = 36, 37


def installed_device() -> Device:
    """The first visible GPU, or the CPU where there is none or no driver."""
    found = _attributes(_CAPABILITY_MAJOR, _CAPABILITY_MINOR)
    return Device("cuda", DeviceCapability(*found)) if found else Device("cpu")


def installed_chip(device: Device) -> Chip:
    """`device`, which is this machine's, with its numbers: of a CPU the cores that this process
    may use, of a GPU what its driver says."""
    if device.kind == "cpu":
        return Chip(device, num_cores())
    found = _attributes(_NUM_SMS, _MEMORY_CLOCK, _MEMORY_BUS_WIDTH)
    if not found:
        return Chip(device)
    num_sms, *memory = found
    return Chip(device, num_sms, memory_gb_per_s(*memory))


def memory_gb_per_s(kilohertz: int, bits: int) -> int:
    """The most that memory with this clock and width of its bus delivers, at both edges of the
    clock."""
    return round(2 * kilohertz * bits / 8 / 1e6)


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
