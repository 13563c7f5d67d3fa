"""A cache of what nvcc compiles for DeepGEMM, and plans of what has to be compiled.

DeepGEMM generates a kernel's source from the sizes of a call by its own heuristic, and runs the
compiler that `DG_JIT_NVCC_COMPILER` names. The front written here is that compiler: it compiles
only what the cache lacks (`nvcc.py`). While `NVCC_PLAN` names a folder, it saves the source and
options there and fails instead: a call tells which kernel it needs within milliseconds.
"""

import ctypes
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.kernels.jit import nvcc
from vllm.kernels.jit.compiled_call import CompiledCall
from vllm.platforms.libraries import find_nvcc
from vllm.utils.dataclasses import dataclass
from vllm.utils.files import write_atomically

_FRONT = """#!/bin/sh
# real: {real}
case " $* " in *" -cubin "*)
  if [ -n "$NVCC_PLAN" ]; then
    for argument in "$@"; do
      case "$argument" in *.cu) cp "$argument" "$NVCC_PLAN/source.cu" ;; esac
    done
    printf '%s\\n' "$@" > "$NVCC_PLAN/arguments"
    exit 1
  fi ;;
esac
exec {words} "${{NVCC_LOG:-/dev/null}}" "$@"
"""
# Without `site`, which takes longer to import than all of this.
_FRONT_CODE = (
    f"import sys; sys.path.append({str(Path(__file__).parents[3])!r}); "
    f"from vllm.kernels.jit.nvcc import main; sys.exit(main())"
)
_PREFIX = "nvcc-front-"


@dataclass(frozen=True)
class NvccCache:
    """folder: entries and recipes by key. real: path of nvcc. version: digest of its --version."""

    folder: Path
    real: str
    version: str

    def has(self, key: str) -> bool:
        return nvcc.read_entry(self.folder, key) is not None

    def name(self, key: str) -> str:
        """The kernel's name, for a key from `plan`."""
        return nvcc.kernel_name(self._read_recipe(key)["source"])

    def compile(self, key: str) -> float:
        """Compiles the kernel of a key from `plan`; seconds spent, 0 for a cache hit. CompileError
        if the compiler fails."""
        recipe = self._read_recipe(key)
        with tempfile.TemporaryDirectory(prefix="vllm-nvcc-") as name:
            arguments = [
                str(Path(name, Path(argument).name))
                if argument.endswith((".cu", ".cubin"))
                else argument
                for argument in recipe["arguments"]
            ]
            request = nvcc.parse(arguments, recipe["source"].encode(), self.version)
            assert request is not None and request.key == key
            request.source.write_text(recipe["source"])
            return nvcc.compiled(self.real, arguments, request, self.folder)[1]

    def plan(self, call: CompiledCall, library: str) -> dict[int, str]:
        """The key of the kernel for each size, "" for a kernel that the library has loaded.

        library: its version, and the chip. Plans are cached, so the calls are made once.
        """
        subject = json.dumps([library, self.version, call.name, call.sizes])
        path = self.folder / "plans" / f"{hashlib.sha256(subject.encode()).hexdigest()}.json"
        known: list[str] | None = None
        with suppress(OSError, ValueError):
            known = json.loads(path.read_text())
        if known is not None and all(not key or self._recipe(key).exists() for key in known):
            return dict(zip(call.sizes, known))
        with tempfile.TemporaryDirectory(prefix="vllm-plan-") as name, _planning(name):
            found = {size: self._asked(call, size, Path(name)) for size in call.sizes}
        if all(found.values()):  # else it depends on what this process did before
            write_atomically(path, json.dumps(list(found.values())).encode())
        return found

    def _asked(self, call: CompiledCall, size: int, folder: Path) -> str:
        """The key of the kernel that a call compiles."""
        for path in folder.iterdir():
            path.unlink()
        try:
            call.run(size)
            return ""
        except Exception:
            if not (folder / "arguments").exists():
                raise  # the call fails for another reason
        arguments = (folder / "arguments").read_text().splitlines()
        source = (folder / "source.cu").read_text()
        request = nvcc.parse(arguments, source.encode(), self.version)
        assert request is not None
        recipe = self._recipe(request.key)
        if not recipe.exists():
            text = json.dumps({"source": source, "arguments": arguments})
            write_atomically(recipe, text.encode())
        return request.key

    def _recipe(self, key: str) -> Path:
        return self.folder / "recipes" / f"{key}.json"

    def _read_recipe(self, key: str) -> dict[str, Any]:
        path = self._recipe(key)
        try:
            recipe: dict[str, Any] = json.loads(path.read_text())
        except ValueError:
            path.unlink(missing_ok=True)  # the next start asks the library again
            raise
        return recipe


def make_nvcc_cache(folder: Path) -> NvccCache | None:
    """Makes DeepGEMM compile through the front, here and in child processes; None without nvcc."""
    named = envs.foreign("DG_JIT_NVCC_COMPILER")
    if named and Path(named).name.startswith(_PREFIX):  # of the process that started this one
        named = Path(named).read_text().splitlines()[1].removeprefix("# real: ")
    real = named or find_nvcc()
    if real is None:
        return None
    said = subprocess.run([real, "--version"], capture_output=True, text=True).stdout
    version = hashlib.sha256(said.encode()).hexdigest()[:16]
    cache = NvccCache(folder, real, version)
    words = [sys.executable, "-I", "-S", "-c", _FRONT_CODE, real, version, str(folder)]
    text = _FRONT.format(real=real, words=shlex.join(words))
    front = folder / f"{_PREFIX}{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    kept = ""
    with suppress(OSError):
        kept = front.read_text()
    if kept != text:  # a machine that lost power may have kept an empty file, which would be run
        write_atomically(front, text.encode(), mode=0o755)
    envs.set_for_children("DG_JIT_NVCC_COMPILER", str(front))
    return cache


@contextmanager
def _planning(folder: str) -> Iterator[None]:
    """Switches the front to planning, and discards what the library prints about its failures."""
    sys.stdout.flush()
    stdout = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    envs.set_for_children("NVCC_PLAN", folder)
    try:
        yield
    finally:
        envs.set_for_children("NVCC_PLAN", None)
        ctypes.CDLL(None).fflush(None)
        os.dup2(stdout, 1)
        os.close(stdout)
