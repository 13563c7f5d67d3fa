"""Helpers. Names that scripts import from here are loaded on first use."""

from importlib import import_module
from typing import Any

_MODULES = {
    "FlexibleArgumentParser": "vllm.utils.argparse_utils",
    "random_uuid": "vllm.utils.network_utils",
    "get_open_port": "vllm.utils.network_utils",
    "cdiv": "vllm.utils.math_utils",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'vllm.utils' has no attribute {name!r}")
