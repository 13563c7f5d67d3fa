"""The chip of this machine, from the CUDA driver: imports no torch and creates no CUDA context."""

import re
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.kernels.evidence.tables import Chip
from vllm.machine import Device, DeviceCapability
from vllm.platforms import native
from vllm.platforms.cpu import cpu_flags, num_cores

if TYPE_CHECKING:
    import ctypes

# CUdevice_attribute values of the driver API; the clock is in kHz, the width of the bus in bits.
_NUM_SMS, _CAPABILITY_MAJOR, _CAPABILITY_MINOR = 16, 75, 76
_MEMORY_CLOCK, _MEMORY_BUS_WIDTH = 36, 37


def installed_device() -> Device:
    """The first visible GPU, or the CPU where there is none, no driver, or a torch without CUDA."""
    gpu = None if is_torch_for_cpus() else visible_gpu()
    return gpu or Device("cpu", isa=native.cpu_isa(cpu_flags()))


def visible_gpu() -> Device | None:
    """The first visible GPU, whether torch can use it or not."""
    found = _attributes(_CAPABILITY_MAJOR, _CAPABILITY_MINOR)
    return Device("cuda", DeviceCapability(*found)) if found else None


@cache
def is_torch_for_cpus() -> bool:
    """Whether the installed torch was built without CUDA."""
    spec = PathFinder.find_spec("torch")  # also where it is hidden from imports
    if spec is None or spec.origin is None:
        return False
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"^cuda\b.*= *None$", text, re.MULTILINE) is not None


def installed_chip(device: Device) -> Chip:
    """`device` of this machine with its properties: usable cores of a CPU; SMs and memory bandwidth
    of a GPU."""
    if device.kind == "cpu":
        return Chip(device, num_cores())
    found = _attributes(_NUM_SMS, _MEMORY_CLOCK, _MEMORY_BUS_WIDTH)
    if not found:
        return Chip(device)
    num_sms, *memory = found
    return Chip(device, num_sms, memory_gb_per_s(*memory))


def memory_gb_per_s(kilohertz: int, bits: int) -> int:
    """Peak bandwidth of double-data-rate memory with this clock and bus width."""
    return round(2 * kilohertz * bits / 8 / 1e6)


def gpu_memory_bytes() -> int | None:
    """Bytes of the first visible GPU; None where there is none."""
    import ctypes

    driver, device = _driver_and_device()
    size = ctypes.c_size_t()
    if driver is None or driver.cuDeviceTotalMem_v2(ctypes.byref(size), device):
        return None
    return size.value


def _driver_and_device() -> "tuple[ctypes.CDLL | None, ctypes.c_int]":
    """(None, ...) where no GPU is visible."""
    import ctypes  # which takes 2 ms of every command

    device = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, device
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None, device
    return driver, device


def _attributes(*numbers: int) -> list[int]:
    """Driver attributes of the first visible GPU; [] where there is none."""
    import ctypes

    driver, device = _driver_and_device()
    if driver is None:
        return []
    values = []
    for number in numbers:
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        values.append(value.value)
    return values
