"""Builds the native library with CMake; everything else is in pyproject.toml.

VLLM_TARGET_DEVICE: cpu, cuda (an error without nvcc) or auto, the default: cuda where nvcc is.
TORCH_CUDA_ARCH_LIST or CUDAARCHS: the GPU architectures. CMAKE_ARGS: more options for CMake, such
as -DVLLM_STRICT_ARCHS=ON. docs/building.md has them all. VLLM_PREBUILT_LIBRARY: a folder with the
library and its manifest, taken instead; tools/set_up.py names one after it has looked at it.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
TARGET_DEVICE = os.environ.get("VLLM_TARGET_DEVICE", "auto")
# Headers alone are used. It is required only where nvcc is, because it brings scipy and networkx.
CUTLASS = "nvidia-cutlass==4.2.0.0"


class NativeLibrary(Extension):
    """`vllm/lib/libvllm_kernels.so`: no Python module, so one file serves every Python."""

    def __init__(self) -> None:
        super().__init__("vllm.lib.libvllm_kernels", sources=[])


class BuildNative(build_ext):
    def build_extension(self, ext: Extension) -> None:
        if prebuilt := os.environ.get("VLLM_PREBUILT_LIBRARY"):
            self.mkpath(str(self._built()))
            for output in self.get_outputs():
                self.copy_file(os.path.join(prebuilt, Path(output).name), output)
            return
        build_dir = Path(self.build_temp).resolve()
        version = self.distribution.get_version().rpartition("+")[2]  # our own
        configure = [
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DVLLM_OUTPUT_DIR={self._built()}",
            f"-DVLLM_VERSION={version}",
            f"-DVLLM_TARGET_DEVICE={TARGET_DEVICE}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        # The library of `make build` or `make build-cuda`, copied here as a file of the package,
        # would pass for the one that is built now.
        for output in self.get_outputs():
            Path(output).unlink(missing_ok=True)
        subprocess.check_call(["cmake", "-S", ROOT, "-B", build_dir, "-G", "Ninja", *configure])
        subprocess.check_call(["cmake", "--build", build_dir])

    def _built(self) -> Path:
        return Path(self.build_lib, "vllm", "lib").resolve()

    def get_outputs(self) -> list[str]:
        return [str(self._built() / name) for name in ("libvllm_kernels.so", "arch_manifest.json")]

    def copy_extensions_to_source(self) -> None:
        """An editable install runs from the source tree, so the library belongs there."""
        shutil.copytree(self._built(), ROOT / "vllm" / "lib", dirs_exist_ok=True)


class PlatformWheel(bdist_wheel):
    """Any Python 3 on this platform: the library does not use Python's ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def has_nvcc() -> bool:
    """Whether CMake will find one (cmake/toolchain.cmake looks in the same places)."""
    roots = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    return bool(
        os.environ.get("CUDACXX")
        or shutil.which("nvcc")
        or any(root and Path(root, "bin", "nvcc").exists() for root in roots)
    )


setup(
    setup_requires=[CUTLASS] if TARGET_DEVICE != "cpu" and has_nvcc() else [],
    ext_modules=[NativeLibrary()],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
)
