"""Finds out which device this is and which libraries work; all else sees the values alone."""

from functools import cache

from vllm import envs
from vllm.errors import ConfigError
from vllm.kernels import registry
from vllm.kernels.evidence.quarantine import with_quarantine
from vllm.kernels.evidence.tables import Chip
from vllm.logger import get_logger
from vllm.machine import NATIVE, Device, DeviceCapability, Lib, Libs
from vllm.platforms import native
from vllm.platforms.cpu import cpu_name
from vllm.platforms.installed import installed_chip, visible_gpu
from vllm.platforms.libraries import installed_libs, native_lib, working_libs

logger = get_logger(__name__)


@cache
def probe_device() -> Device:
    """The device that models run on: the first GPU, or the CPU where there is none, or a torch
    without CUDA; ConfigError for a GPU that torch with CUDA cannot use."""
    import torch

    if torch.cuda.is_available():
        return Device("cuda", DeviceCapability(*torch.cuda.get_device_capability()))
    if (gpu := visible_gpu()) is not None:
        _report_unused_gpu(gpu)
    if native.status().state != "present":
        return Device("cpu")
    try:
        return Device("cpu", isa=native.load(envs.VLLM_CPU_ISA).cpu_isa())
    except ValueError as error:
        raise ConfigError(f"VLLM_CPU_ISA={envs.VLLM_CPU_ISA}: {error}") from error


def _report_unused_gpu(gpu: Device) -> None:
    import torch

    if torch.version.cuda is None:
        logger.warning("torch %s is built for CPUs, so models run on the CPU and not on the GPU of "
                       "this machine (%s): install torch with CUDA to use that", torch.__version__,
                       gpu)  # fmt: skip
        return
    try:
        torch.cuda.init()
        reason = "it finds no GPU"
    except Exception as error:  # whatever torch or the driver raises
        reason = " ".join(str(error).split())
    raise ConfigError(
        f"torch {torch.__version__} with CUDA {torch.version.cuda} cannot use the GPU of this "
        f"machine ({gpu}): {reason}; update the driver or install another torch, or set "
        f"CUDA_VISIBLE_DEVICES= to serve on the CPU"
    )


@cache
def probe_chip() -> Chip:
    """The device with its number of SMs or cores and its memory bandwidth."""
    return installed_chip(probe_device())


def device_name() -> str:
    """The vendor's name of the device."""
    import torch

    if probe_device().kind == "cuda":
        return str(torch.cuda.get_device_name())
    return cpu_name()


def installed_kernel_libs(device: Device) -> Libs:
    """As `probe_libs`, from package metadata alone: nothing is imported or tried."""
    native = native_lib()
    found = [*installed_libs().libs, registry.built(), *([native] if native else [])]
    return with_quarantine(Libs.of(found), device)


def probe_libs() -> Libs:
    """Working libraries, with the kernels that are in quarantine here."""
    libs = Libs.of([*_working_libs().libs, registry.built()])
    return with_quarantine(libs, probe_device())


@cache
def _working_libs() -> Libs:
    """On a GPU, only libraries that a kernel of this build uses are tried: trials take time. torch
    works, as this process has asked it for the device."""
    is_cpu = probe_device().kind == "cpu"
    found = installed_libs() if is_cpu else working_libs(registry.used_libs() - {"torch"})
    native = _native_lib()
    return Libs.of([*found.libs, *([native] if native else [])])


def _native_lib() -> Lib | None:
    status = native.status()
    return Lib(NATIVE, broken=status.text) if status.state == "broken" else native_lib()
