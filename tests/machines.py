"""Machines that tests run on in thought: a chip, and the libraries found in a folder."""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vllm.machine import DeviceCapability
from vllm.platforms import libraries
from vllm.platforms.interface import Platform
from vllm.utils import deep_gemm

STAND_INS = Path(__file__).parent / "stand_ins"
# What a trial says of a package there depends on nothing that a test changes.
_try_stand_in = functools.cache(libraries._try_in_child)


class Gpu(Platform):
    """A CUDA chip of one capability."""

    device_type = "cuda"

    def __init__(self, capability: int):
        self.capability = DeviceCapability.parse(capability)

    def get_device_capability(self) -> DeviceCapability:
        return self.capability


class Cpu(Platform):
    device_type = "cpu"


@contextmanager
def machine(platform: Platform, folder: Path | None = None) -> Iterator[pytest.MonkeyPatch]:
    """Inside the block, `platform` is the current one and the packages in `folder` come first."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.platforms.current_platform", platform, raising=False)
        if folder is not None:
            patch.syspath_prepend(str(folder))
        if folder == STAND_INS:
            patch.setattr(libraries, "_try_in_child", _try_stand_in)
        _forget()
        try:
            yield patch
        finally:
            _forget()
            # Of real libraries Triton aborts the process that imports it twice.
            for name in set(sys.modules) - before:
                file = getattr(sys.modules[name], "__file__", None)
                if folder is not None and file and Path(file).is_relative_to(folder):
                    del sys.modules[name]


def _forget() -> None:
    """What a process asks once, asked anew."""
    libraries.library_state.cache_clear()
    deep_gemm._library_gemm.cache_clear()
    deep_gemm.get_mk_alignment_for_contiguous_layout.cache_clear()


def write_package(folder: Path, module: str, code: str = "", files: tuple[str, ...] = ()) -> None:
    """A package that imports as `module` and runs `code`, with empty `files` inside it."""
    (folder / module).mkdir(parents=True)
    (folder / module / "__init__.py").write_text(code)
    for name in files:
        path = folder / module / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def write_distribution(folder: Path, name: str, version: str) -> None:
    """The metadata that pip leaves for an installed distribution."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
