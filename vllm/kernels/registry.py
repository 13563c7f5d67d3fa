"""The backends, in order of preference. A new one is a file in `backends/` and a line here.

Importing a backend's module needs the standard library only; what it is built on is imported
when its kernels are made.
"""

from functools import cache
from importlib import import_module
from types import ModuleType

from vllm.errors import ConfigError, did_you_mean
from vllm.kernels.spec import KernelSpec

BACKENDS = (
    "cpu",
    "torch",
)


def backend(name: str) -> ModuleType:
    """The module of backend `name`: its SPECS and a maker per problem family."""
    return import_module(f"vllm.kernels.backends.{name}")


@cache
def specs() -> tuple[KernelSpec, ...]:
    """Every kernel of every backend, in order of preference."""
    return tuple(spec for name in BACKENDS for spec in backend(name).SPECS)


def backend_names(family: str) -> list[str]:
    """The backends that have a kernel for `family`: the values its flag takes."""
    return list(dict.fromkeys(spec.backend for spec in specs() if spec.family == family))


def check_backend_name(family: str, name: str, source: str) -> str:
    """Returns `name`, or raises ConfigError naming `source` and what it accepts."""
    names = backend_names(family)
    if name not in names:
        raise ConfigError(
            f"{source}: unknown {family} backend {name!r}: it takes {', '.join(names)}"
            f"{did_you_mean(name, names)}"
        )
    return name
