"""The only reader of `os.environ`: every variable of the project, typed, with its default.

`envs.VLLM_X` reads and validates the variable at each access, so that a test or a parent
process can set it at any time before it is used. An invalid value is an error; an unknown
`VLLM_*` name is a warning with a suggestion (`unknown_variables`), never an error, because
Kubernetes injects names such as `VLLM_SERVICE_HOST` for a service called `vllm`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.errors import ConfigError, did_you_mean


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: `parse` maps the text to a value or raises ValueError."""

    parse: Callable[[str], Any]
    default: Callable[[], Any]
    accepts: str
    doc: str


def _tri_state(text: str) -> bool:
    if text in ("0", "1"):
        return text == "1"
    raise ValueError


def _choice(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() in names:
            return text.lower()
        raise ValueError

    return parse


def _positive_int(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise ValueError
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def _path(text: str) -> Path:
    if not text:
        raise ValueError
    return Path(text).expanduser()


def _text(text: str) -> str:
    if not text:
        raise ValueError
    return text


_LEVELS = ("debug", "info", "warning", "error")
_ISAS = ("portable", "avx2", "avx512")
ALL2ALL_BACKENDS = (
    "naive", "allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency",
)  # fmt: skip
_NVFP4_BACKENDS = ("marlin", "cutlass", "flashinfer-cutlass", "flashinfer-trtllm")

VARIABLES: dict[str, Variable] = {
    "VLLM_CACHE_ROOT": Variable(
        _path,
        lambda: Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vllm",
        "a folder",
        "Where the demo model and other generated files are kept.",
    ),
    "VLLM_KERNEL_BUNDLE": Variable(
        _path,
        lambda: None,
        "a folder that `vllm kernels precompile` wrote",
        "Kernels compiled elsewhere for this chip and these libraries; only read.",
    ),
    "VLLM_KERNEL_CACHE": Variable(
        _path,
        lambda: read("VLLM_CACHE_ROOT") / "compiled",
        "a folder",
        "Where kernels that were compiled on this machine are kept; unset: in VLLM_CACHE_ROOT.",
    ),
    "VLLM_KERNEL_COMPILE_SECONDS": Variable(
        _positive_float,
        lambda: 5.0,
        "a number of seconds above 0",
        "How long a start waits, with its weights loaded, for kernels that a prebuilt kernel can "
        "replace meanwhile; those not ready by then are compiled while it serves.",
    ),
    "VLLM_LOGGING_LEVEL": Variable(
        _choice(*_LEVELS), lambda: "info", "one of " + ", ".join(_LEVELS), "Log level."
    ),
    "VLLM_API_KEY": Variable(
        _text, lambda: None, "a non-empty text", "Key the HTTP server asks for (see --api-key)."
    ),
    "VLLM_CPU_KVCACHE_SPACE": Variable(
        _positive_float,
        lambda: None,
        "a number of GiB above 0",
        "KV cache size on the CPU in GiB; unset: as much as the limits on requests can use, "
        "at most 4 GiB and half of the free memory.",
    ),
    "VLLM_CPU_ISA": Variable(
        _choice(*_ISAS),
        lambda: None,
        "one of " + ", ".join(_ISAS),
        "Instruction set of the native CPU kernels; unset: the best the chip has.",
    ),
    "VLLM_TARGET_DEVICE": Variable(
        _choice("auto", "cpu", "cuda"),
        lambda: None,
        "auto, cpu or cuda",
        "What `pip install` builds native kernels for; read by the build alone.",
    ),
    "VLLM_LINEAR_BACKEND": Variable(
        _text, lambda: None, "a backend name", "Same as --linear-backend, which takes precedence."
    ),
    "VLLM_USE_DEEP_GEMM": Variable(
        _tri_state,
        lambda: None,
        "0 or 1",
        "DeepGEMM for FP8 block layers: 0 never; 1 overrides the model rule (and refuses to "
        "start where DeepGEMM cannot run); unset: automatic.",
    ),
    "VLLM_MOE_USE_DEEP_GEMM": Variable(
        _tri_state,
        lambda: None,
        "0 or 1",
        "The same for mixture-of-experts layers; unset: as VLLM_USE_DEEP_GEMM.",
    ),
    "VLLM_USE_DEEP_GEMM_E8M0": Variable(
        _tri_state,
        lambda: None,
        "0 or 1",
        "Power-of-two scales for DeepGEMM: 1 always, 0 never (which excludes DeepGEMM on "
        "capability families 100 and 120); unset: what the chip requires.",
    ),
    "VLLM_NVFP4_GEMM_BACKEND": Variable(
        _choice(*_NVFP4_BACKENDS),
        lambda: None,
        "one of " + ", ".join(_NVFP4_BACKENDS),
        "The backend of NVFP4 linear layers; unset: the selector's choice.",
    ),
    "VLLM_ALL2ALL_BACKEND": Variable(
        _choice(*ALL2ALL_BACKENDS),
        lambda: "allgather_reducescatter",
        "one of " + ", ".join(ALL2ALL_BACKENDS),
        "Exchange of tokens and results with experts on other ranks.",
    ),
    "VLLM_TEST_FORCE_FP8_MARLIN": Variable(
        _tri_state,
        lambda: None,
        "0 or 1",
        "1: weight-only Marlin for every FP8 layer.",
    ),
}

# Those that kernel selection follows.
KERNEL_VARIABLES = (
    "VLLM_USE_DEEP_GEMM",
    "VLLM_MOE_USE_DEEP_GEMM",
    "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_NVFP4_GEMM_BACKEND",
    "VLLM_TEST_FORCE_FP8_MARLIN",
    "VLLM_LINEAR_BACKEND",
)

# Retired or foreign names that start with VLLM_ and are nobody's mistake.
_KUBERNETES_MARKS = ("_SERVICE_HOST", "_SERVICE_PORT", "_PORT_")


def read(name: str) -> Any:
    """Value of the variable `name`, its default if unset; ConfigError if its text is invalid."""
    variable = VARIABLES[name]
    text = os.environ.get(name)
    if text is None:
        return variable.default()
    try:
        return variable.parse(text)
    except ValueError:
        raise ConfigError(
            f"environment variable {name}={text!r} is not valid: it takes {variable.accepts}. "
            f"Correct it or unset it."
        ) from None


def is_set(name: str) -> bool:
    """Whether the user set the variable `name` explicitly."""
    return name in VARIABLES and name in os.environ


def kernel_variables() -> dict[str, Any]:
    """The KERNEL_VARIABLES that are set, with their values."""
    return {name: read(name) for name in KERNEL_VARIABLES if is_set(name)}


def texts() -> dict[str, str]:
    """The variables that the user set, as they are: for processes on other machines."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def check_all() -> list[str]:
    """Validates every variable that is set; returns a warning for each unknown `VLLM_*` name."""
    for name in VARIABLES:
        read(name)
    return [
        f"unknown environment variable {name}" + did_you_mean(name, VARIABLES)
        for name in sorted(os.environ)
        if name.startswith("VLLM_")
        and name not in VARIABLES
        and not any(mark in name for mark in _KUBERNETES_MARKS)
        and not name.endswith("_PORT")
    ]


def set_for_children(name: str, value: str | None) -> None:
    """Sets a variable for this process and the processes it starts; None unsets it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def foreign(name: str) -> str | None:
    """A variable of a library's own, as it is; None where it is unset or empty."""
    return os.environ.get(name) or None


def __getattr__(name: str) -> Any:
    if name in VARIABLES:
        return read(name)
    raise AttributeError(f"module 'vllm.envs' has no attribute {name!r}")
