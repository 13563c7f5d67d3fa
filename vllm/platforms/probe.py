"""The one place that asks the world: which device is this, which libraries work.

Everything after it sees only the frozen `Device` and `Libs` returned here.
"""

from functools import cache

import torch

from vllm import _native, envs
from vllm.errors import ConfigError
from vllm.kernels.spec import Device, Lib, Libs


@cache
def probe_device() -> Device:
    """The device that models run on."""
    if _native.status().state != "present":
        return Device("cpu")
    try:
        return Device("cpu", isa=_native.load(envs.VLLM_CPU_ISA).cpu_isa())
    except ValueError as error:
        raise ConfigError(f"VLLM_CPU_ISA={envs.VLLM_CPU_ISA}: {error}") from error


@cache
def probe_libs() -> Libs:
    """torch and our own native library; a library that is installed but fails is `broken`."""
    return Libs.of([Lib("torch", torch.__version__.partition("+")[0]), *_native_lib()])


def _native_lib() -> list[Lib]:
    status = _native.status()
    if status.state == "present":
        return [Lib("native", _native.manifest()["version"])]
    return [Lib("native", broken=status.text)] if status.state == "broken" else []
