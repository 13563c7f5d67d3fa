"""What must be equal on all ranks, as texts to compare."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from vllm import envs
from vllm.config import VllmConfig
from vllm.kernels import registry
from vllm.kernels.evidence.quarantine import read_failures
from vllm.machine import Device
from vllm.platforms.probe import probe_device
from vllm.version import __version__

# Variables that do not affect what is computed.
_OWN_VARIABLES = frozenset(
    {
        "VLLM_API_KEY",
        "VLLM_CACHE_ROOT",
        "VLLM_KERNEL_BUNDLE",
        "VLLM_KERNEL_CACHE",
        "VLLM_KERNEL_COMPILE_SECONDS",
        "VLLM_LOGGING_LEVEL",
        "VLLM_TARGET_DEVICE",
    }
)
# Fields that differ between ranks.
_OWN_FIELDS = frozenset({"data_parallel_rank", "dump_decisions"})


def facts_of(config: VllmConfig) -> dict[str, str]:
    """By name, causes before their consequences."""
    names = sorted(name for name in envs.VARIABLES if envs.is_set(name))
    variables = {name: str(envs.read(name)) for name in names if name not in _OWN_VARIABLES}
    return {
        "versions": f"vllm {__version__}, torch {torch.__version__}",
        "the device": str(probe_device()),
        "variables": json.dumps(variables),
        "kernels in quarantine (vllm kernels quarantine)": _quarantined(),
        "backends of files (--kernel)": _own_backends(),
        "the checkpoint": _checkpoint(config.model_config.path),
        "the configuration": _digest(json.dumps(_plain(config), sort_keys=True)),
    }


def _quarantined() -> str:
    """The quarantine entries that apply to this device; kernel decisions depend on them."""
    arch = probe_device().arch
    places = {
        f"{f.backend} {f.version} {f.size_key}"
        for f in read_failures()
        if f.release == __version__ and Device.parse(f.device).arch == arch
    }
    return "; ".join(sorted(places)) or "none"


def _own_backends() -> str:
    found = {registry.code_version(backend) for _, backend in registry.own_backends()}
    return "; ".join(sorted(found)) or "none"


def _checkpoint(folder: Path) -> str:
    """Names and sizes of its files."""
    files = sorted(p for p in folder.glob("*") if p.suffix in (".safetensors", ".json"))
    sizes = [(file.name, file.stat().st_size) for file in files]
    total = sum(size for _, size in sizes)
    return f"{len(sizes)} files of {total} bytes, {_digest(json.dumps(sizes))}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """As JSON takes it."""
    if dataclasses.is_dataclass(value):
        return {
            f.name: _plain(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if f.name not in _OWN_FIELDS
        }
    if hasattr(value, "to_json_string"):
        return value.to_json_string()
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if hasattr(value, "from_checkpoint"):
        public = {key: entry for key, entry in vars(value).items() if not key.startswith("_")}
        return {"class": type(value).__name__, **_plain(public)}
    return str(value)
