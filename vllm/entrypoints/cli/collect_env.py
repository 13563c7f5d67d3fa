"""`vllm collect-env`: what a bug report needs to know about this machine."""

import argparse
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.entrypoints.compatibility.variables import notice_of
from vllm.version import __version__

_PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "apache-tvm-ffi",
    "fastapi", "uvicorn", "aiohttp", "httptools", "uvloop", "pydantic", "msgspec", "pyzmq",
    "xgrammar", "prometheus_client", "triton", "flashinfer-python", "sgl-deep-gemm", "numpy",
)  # fmt: skip
_CPU_FEATURES = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_fp16",
    "avx512_vnni", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8", "sve", "sve2", "asimd", "bf16",
)  # fmt: skip
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "collect-env",
        description="Describe this machine for a report: versions, processor, memory, native "
        "library, GPUs, kernel libraries and VLLM_* variables (secrets hidden).",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    for title, collect in _SECTIONS.items():
        try:
            rows = collect()
        except Exception as error:  # a report about a broken machine must still come out
            rows = {"error": f"{type(error).__name__}: {error}"}
        print(title)
        for name, value in rows.items():
            print(f"  {name}: {value}")


def _versions() -> dict[str, str]:
    rows = {"vllm": __version__, "python": sys.version.replace("\n", " ")}
    for name in _PACKAGES:
        try:
            rows[name] = version(name)
        except PackageNotFoundError:
            rows[name] = "not installed"
    return rows


def _system() -> dict[str, str]:
    release = _field(Path("/etc/os-release"), r'PRETTY_NAME="?([^"\n]*)') or platform.system()
    return {"os": release, "kernel": platform.release(), "libc": " ".join(platform.libc_ver())}


def _processor() -> dict[str, str]:
    from vllm.platforms.cpu import available_memory, num_cores

    info = Path("/proc/cpuinfo")
    flags = set((_field(info, r"(?:flags|Features)\s*:\s*(.*)") or "").split())
    total = _field(Path("/proc/meminfo"), r"MemTotal:\s*(\d+)")
    return {
        "model": _field(info, r"model name\s*:\s*(.*)") or platform.machine(),
        "threads usable": str(num_cores()),
        "features": " ".join(f for f in _CPU_FEATURES if f in flags) or "unknown",
        "memory total": f"{int(total) / 2**20:.1f} GiB" if total else "unknown",
        "memory available": f"{available_memory() / 2**30:.1f} GiB",
    }


def _native() -> dict[str, str]:
    from vllm.platforms import native

    status = native.status()
    rows = {"state": status.state, "detail": status.text}
    if status.state == "present":
        rows |= {name: str(value) for name, value in native.manifest().items()}
    return rows


def _torch() -> dict[str, str]:
    import torch

    from vllm.platforms import current_platform

    return {
        "version": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cuda available": str(current_platform.is_cuda()),
        "threads": str(torch.get_num_threads()),
    }


def _selector() -> dict[str, str]:
    from vllm.platforms.probe import probe_device, probe_libs

    return {"device": str(probe_device()), "libraries": str(probe_libs())}


def _gpus() -> dict[str, str]:
    query = "name,compute_cap,memory.total,driver_version"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except FileNotFoundError:
        return {"nvidia-smi": "not found"}
    except (subprocess.SubprocessError, OSError) as error:
        return {"nvidia-smi": f"failed: {error}"}
    return {str(index): line for index, line in enumerate(done.stdout.splitlines())}


def _variables() -> dict[str, str]:
    rows = {name: _shown(name) for name in envs.VARIABLES if envs.is_set(name)}
    return rows | {f"warning {i}": text for i, text in enumerate(envs.check_all(notice_of), 1)}


def _shown(name: str) -> str:
    hidden = any(mark in name for mark in _SECRETS)
    return "(set, hidden)" if hidden else str(envs.read(name))


def _field(path: Path, pattern: str) -> str | None:
    """The first group of the first match of `pattern` in a file that may not exist."""
    try:
        match = re.search(pattern, path.read_text(errors="replace"))
    except OSError:
        return None
    return match[1].strip() if match else None


_SECTIONS: dict[str, Callable[[], dict[str, str]]] = {
    "Versions": _versions,
    "System": _system,
    "Processor": _processor,
    "Native library": _native,
    "torch": _torch,
    "Kernel selector": _selector,
    "GPUs": _gpus,
    "Variables": _variables,
}
