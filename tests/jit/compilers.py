"""A compiler that only says it compiled, and a library that calls it as DeepGEMM calls nvcc."""

import os
import subprocess
from pathlib import Path

from vllm.kernels.jit.compiled_call import CompiledCall
from vllm.kernels.jit.nvcc_cache import NvccCache, make_nvcc_cache

_NVCC = """#!/bin/sh
case "$*" in *--version*) echo "release 13.0 {version}"; exit 0 ;; esac
sleep {seconds}
while [ $# -gt 0 ]; do
  case "$1" in
    *.cu) source="$1" ;;
    -o) shift; output="$1" ;;
  esac
  shift
done
if grep -q broken "$source"; then echo "error: it is broken"; exit 1; fi
echo "$$" >> {log}
(echo object of; cat "$source") > "$output"
"""


class Compiler:
    """path: the executable. num_runs: how many kernels it made."""

    def __init__(self, folder: Path, seconds: float = 0.0, version: str = "V13.0.1"):
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._log = folder / "nvcc", folder / "runs"
        self.path.write_text(_NVCC.format(seconds=seconds, log=self._log, version=version))
        self.path.chmod(0o755)

    @property
    def num_runs(self) -> int:
        return len(self._log.read_text().splitlines()) if self._log.exists() else 0

    def nvcc_cache(self, folder: Path, patch) -> NvccCache:
        """What a process makes of it that keeps kernels in `folder`."""
        patch.setenv("DG_JIT_NVCC_COMPILER", str(self.path))
        nvcc_cache = make_nvcc_cache(folder)
        assert nvcc_cache is not None
        return nvcc_cache


class Library:
    """Compiles a kernel for tiles of 16, 32 or 64 rows at the first call that needs it; what it
    loaded, it has. A process that starts anew is another Library."""

    def __init__(self, folder: Path, name: str = "gemm", broken: tuple[int, ...] = ()):
        self._folder, self._name, self._broken = folder, name, broken
        self.loaded: dict[int, bytes] = {}
        self.num_calls = 0

    def call(self, sizes: tuple[int, ...] = (16, 32, 64, 128, 192)) -> CompiledCall:
        return CompiledCall(self._name, sizes, self.run)

    def run(self, size: int) -> None:
        self.num_calls += 1
        tile = next((t for t in (16, 32) if size <= t), 64)
        if tile not in self.loaded:
            self.loaded[tile] = self._compile(tile)

    def _compile(self, tile: int) -> bytes:
        folder = self._folder / f"tmp-{len(os.listdir(self._folder))}"
        folder.mkdir()
        text = f"broken {tile}" if tile in self._broken else f"auto p = (&gemm_impl<{tile}, 128>);"
        (folder / "kernel.cu").write_text(f"// {self._name}\n{text}\n")
        front = os.environ["DG_JIT_NVCC_COMPILER"]
        arguments = f"kernel.cu -cubin -o {folder}/kernel.cubin -O3 -I{self._folder}/include"
        done = subprocess.run(f"cd {folder} && {front} {arguments}", shell=True)
        if done.returncode:
            raise RuntimeError("NVCC compilation failed")
        return (folder / "kernel.cubin").read_bytes()
