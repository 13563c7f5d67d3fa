"""Installed distributions, from their metadata folders.

`importlib.metadata` takes longer to import than `vllm kernels explain` takes to explain a model.
"""

import os
import re
import sys
from collections.abc import Iterator
from functools import lru_cache


def installed_version(name: str) -> str:
    """Of a distribution; "" for one that is not installed."""
    folder = metadata_folders().get(_normal(name))
    if folder is None:
        return ""
    head = (read(folder, "METADATA") or read(folder, "PKG-INFO")).partition("\n\n")[0]
    match = re.search(r"^Version: *(\S+)", head, re.MULTILINE)
    return match[1] if match else ""


def metadata_folders() -> dict[str, str]:
    """By normalised name, in the order of `sys.path`; of several of one name the first counts."""
    found: dict[str, str] = {}
    for path in sys.path:
        for name, folder in _folders_in(path):
            found.setdefault(name, folder)
    return found


def read(folder: str, name: str) -> str:
    """A file of a metadata folder; "" where there is none."""
    try:
        with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _folders_in(path: str) -> tuple[tuple[str, str], ...]:
    try:
        return _listed(path or ".", os.stat(path or ".").st_mtime_ns)
    except OSError:  # a zip file, or no file at all
        return ()


@lru_cache(maxsize=64)
def _listed(path: str, changed: int) -> tuple[tuple[str, str], ...]:
    """changed: when, in ns, so that what is installed later is found."""

    def found() -> Iterator[tuple[str, str]]:
        for entry in os.listdir(path):
            stem, _, kind = entry.rpartition(".")
            if kind in ("dist-info", "egg-info"):
                yield _normal(stem.partition("-")[0]), os.path.join(path, entry)

    return tuple(found())


def _normal(name: str) -> str:
    """`sgl_deep.gemm` -> `sgl-deep-gemm`"""
    return name.lower().replace("_", "-").replace(".", "-")
