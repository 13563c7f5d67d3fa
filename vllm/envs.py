"""The only reader of `os.environ`: every variable of the project, typed, with its default.

`envs.VLLM_X` reads and validates the variable at each access, so that a test or a parent
process can set it at any time before it is used. An invalid value is an error; an unknown
`VLLM_*` name is a warning with a suggestion (`check_all`), never an error, because
Kubernetes injects names such as `VLLM_SERVICE_HOST` for a service called `vllm`.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm.errors import ConfigError, did_you_mean
from vllm.utils.dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One environment variable: `parse` maps the text to a value or raises ValueError; `accepts`
    says which texts it takes, `default` gives the value of one that is unset."""

    parse: Callable[[str], Any]
    accepts: str
    doc: str
    default: Callable[[], Any] = lambda: None


def _text(text: str) -> str:
    if not text:
        raise ValueError
    return text


def _path(text: str) -> Path:
    return Path(_text(text)).expanduser()


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def _whole_seconds(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value


def _switch(doc: str) -> Variable:
    return Variable(lambda text: _choice(text, ("0", "1")) == "1", "0 or 1", doc)


def _one_of(names: tuple[str, ...], doc: str, default: str | None = None) -> Variable:
    accepts = "one of " + ", ".join(names)
    return Variable(lambda text: _choice(text.lower(), names), accepts, doc, lambda: default)


def _choice(text: str, names: tuple[str, ...]) -> str:
    if text not in names:
        raise ValueError
    return text


VARIABLES: dict[str, Variable] = {
    "VLLM_CACHE_ROOT": Variable(
        _path,
        "a folder",
        "Where the demo model and other generated files are kept.",
        lambda: Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vllm",
    ),
    "VLLM_KERNEL_BUNDLE": Variable(
        _path,
        "a folder that `vllm kernels precompile` wrote",
        "Kernels compiled elsewhere for this chip and these libraries; only read.",
    ),
    "VLLM_KERNEL_CACHE": Variable(
        _path,
        "a folder",
        "Where kernels that were compiled on this machine are kept; unset: in VLLM_CACHE_ROOT.",
        lambda: read("VLLM_CACHE_ROOT") / "compiled",
    ),
    "VLLM_TORCH_PROFILER_DIR": Variable(
        _path,
        "a folder",
        "Where `start_profile` and `stop_profile` write traces of torch's profiler.",
    ),
    "VLLM_SERVER_DEV_MODE": _switch(
        "Serve the endpoints of development: /server_info, /reset_prefix_cache, /sleep, /wake_up, "
        "/is_sleeping, /start_profile, /stop_profile. Whoever reaches the server may stall it."
    ),
    "VLLM_KERNEL_COMPILE_SECONDS": Variable(
        _positive,
        "a number of seconds above 0",
        "How long a start waits, with its weights loaded, for kernels that a prebuilt kernel can "
        "replace meanwhile; those not ready by then are compiled while it serves.",
        lambda: 5.0,
    ),
    "VLLM_LOGGING_LEVEL": _one_of(("debug", "info", "warning", "error"), "Log level.", "info"),
    "VLLM_LOG_FORMAT": _one_of(("text", "json"), "Same as --log-format.", "text"),
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": Variable(
        str, "http/protobuf", "Protocol of --otlp-traces-endpoint, which speaks this one alone."
    ),
    "VLLM_API_KEY": Variable(
        _text, "a non-empty text", "Key the HTTP server asks for (see --api-key)."
    ),
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": Variable(
        _whole_seconds,
        "a whole number of seconds from 1",
        "How long the HTTP server keeps an idle connection.",
        lambda: 60,
    ),
    "VLLM_HOST_IP": Variable(
        _text,
        "an address of this machine",
        "Where data-parallel engines on a Ray cluster meet; unset: the address of its first route.",
    ),
    "VLLM_CPU_KVCACHE_SPACE": Variable(
        _positive,
        "a number of GiB above 0",
        "KV cache size on the CPU in GiB; unset: as much as the limits on requests can use, "
        "at most 4 GiB and half of the free memory.",
    ),
    "VLLM_CPU_ISA": _one_of(
        ("portable", "avx2", "avx512", "avx512_bf16"),
        "Instruction set of the native CPU kernels; unset: the best the chip has.",
    ),
    "VLLM_TARGET_DEVICE": Variable(
        lambda text: _choice(text.lower(), ("auto", "cpu", "cuda")),
        "auto, cpu or cuda",
        "What `pip install` builds native kernels for; read by the build alone.",
    ),
    "VLLM_PRECOMPILED_WHEEL_LOCATION": Variable(
        str,
        "a path or a URL",
        "A wheel whose native library `make serve` takes instead of compiling; read by it alone.",
    ),
    "VLLM_LINEAR_BACKEND": Variable(
        _text, "a backend name", "Same as --linear-backend, which takes precedence."
    ),
    "VLLM_ATTENTION_BACKEND": Variable(
        _text, "a backend name", "Same as --attention-backend, which takes precedence."
    ),
    "VLLM_USE_DEEP_GEMM": _switch(
        "DeepGEMM for FP8 block layers: 0 never; 1 lifts the model rule and prefers it to the "
        "default order (measurements still decide); unset: automatic."
    ),
    "VLLM_MOE_USE_DEEP_GEMM": _switch(
        "The same for mixture-of-experts layers, unless VLLM_USE_DEEP_GEMM is 0; unset: as that."
    ),
    "VLLM_USE_DEEP_GEMM_E8M0": _switch(
        "Power-of-two scales for DeepGEMM: 1 always, 0 never (which excludes DeepGEMM on "
        "capability families 100 and 120); unset: what the chip requires."
    ),
    "VLLM_NVFP4_GEMM_BACKEND": _one_of(
        ("marlin", "cutlass", "flashinfer-cutlass", "flashinfer-trtllm"),
        "The backend of NVFP4 linear layers; unset: the selector's choice.",
    ),
    "VLLM_ALL2ALL_BACKEND": _one_of(
        ("naive", "allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency"),
        "Exchange of tokens and results with experts on other ranks.",
        "allgather_reducescatter",
    ),
    "VLLM_TEST_FORCE_FP8_MARLIN": _switch("1: weight-only Marlin for every FP8 layer."),
}

# Those that kernel selection follows.
KERNEL_VARIABLES = (
    "VLLM_USE_DEEP_GEMM",
    "VLLM_MOE_USE_DEEP_GEMM",
    "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_NVFP4_GEMM_BACKEND",
    "VLLM_TEST_FORCE_FP8_MARLIN",
    "VLLM_LINEAR_BACKEND",
    "VLLM_ATTENTION_BACKEND",
)

SECRETS = frozenset({"VLLM_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})

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
    """The variables that the user set, as they are, without secrets: for processes on other
    machines."""
    shown = (name for name in VARIABLES if name in os.environ and name not in SECRETS)
    return {name: os.environ[name] for name in shown}


@contextmanager
def without_secrets() -> Iterator[None]:
    """Processes that are started meanwhile do not get the SECRETS."""
    held = {name: os.environ.pop(name) for name in SECRETS if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(held)


def check_all(notice_of: Callable[[str], str | None] = lambda name: None) -> list[str]:
    """Validates every variable that is set; returns a line for each other `VLLM_*` name: what
    `notice_of` says of one that it knows, a warning else."""
    for name in VARIABLES:
        read(name)
    lines = []
    for name in sorted(os.environ):
        if name.startswith("VLLM_") and name not in VARIABLES and not _is_of_kubernetes(name):
            unknown = f"unknown environment variable {name}{did_you_mean(name, VARIABLES)}"
            lines.append(notice if (notice := notice_of(name)) is not None else unknown)
    return lines


def _is_of_kubernetes(name: str) -> bool:
    """It injects `VLLM_PORT=tcp://10.0.0.1:80` for a service called vllm, and others beside it."""
    if any(mark in name for mark in _KUBERNETES_MARKS):
        return True
    return name.endswith("_PORT") and "://" in os.environ[name]


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
