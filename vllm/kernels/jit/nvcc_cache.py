"""What nvcc made for DeepGEMM, kept across starts, and found out without compiling.

DeepGEMM generates a kernel's source by a heuristic of its own, from the sizes of a call, and runs
the compiler that `DG_JIT_NVCC_COMPILER` names. The front written here is that compiler: it looks an
object up before it compiles one (`nvcc.py`). While `NVCC_PLAN` names a folder, it writes down what
it was asked for and fails instead: so a call tells which kernel it needs in milliseconds.
"""

import ctypes
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.kernels.jit import nvcc
from vllm.platforms.libraries import find_nvcc
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


@dataclass(frozen=True, slots=True)
class CompiledCall:
    """A call whose kernel depends on one size of it, for a library that compiles with nvcc.

    name: tells it from calls of other fixed sizes. sizes: ascending; a call of size s runs the
    kernel of the least of them that is not below s. run: makes the call, of a size.
    """

    name: str
    sizes: tuple[int, ...]
    run: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Memory:
    """folder: with entries by key, and how to make them. real: the compiler. version: its own, as a
    digest of what it says."""

    folder: Path
    real: str
    version: str

    def has(self, key: str) -> bool:
        return nvcc.read_entry(self.folder, key) is not None

    def name(self, key: str) -> str:
        """Of a kernel that `plan` returned."""
        return nvcc.kernel_name(self._read_recipe(key)["source"])

    def compile(self, key: str) -> float:
        """Makes the entry of a kernel that `plan` returned; the seconds that took, 0 where it was
        there. CompileError where the compiler fails."""
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
        """By size the key of its kernel, "" for one that the library has loaded already.

        library: its version, and the chip. The answer is remembered: no call is made for it again.
        """
        subject = json.dumps([library, self.version, call.name, call.sizes])
        path = self.folder / "plans" / f"{hashlib.sha256(subject.encode()).hexdigest()}.json"
        known = _read_plan(path)
        if known is not None and all(not key or self._recipe(key).exists() for key in known):
            return dict(zip(call.sizes, known))
        with tempfile.TemporaryDirectory(prefix="vllm-plan-") as name, _planning(name):
            found = {size: self._asked(call, size, Path(name)) for size in call.sizes}
        if all(found.values()):  # else it depends on what this process did before
            write_atomically(path, json.dumps(list(found.values())).encode())
        return found

    def _asked(self, call: CompiledCall, size: int, folder: Path) -> str:
        """The key of the kernel that a call asks for."""
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


def make_memory(folder: Path) -> Memory | None:
    """Puts the front in DeepGEMM's way, for this process and those it starts; None without nvcc."""
    named = envs.foreign("DG_JIT_NVCC_COMPILER")
    if named and Path(named).name.startswith(_PREFIX):  # of the process that started this one
        named = Path(named).read_text().splitlines()[1].removeprefix("# real: ")
    real = named or find_nvcc()
    if real is None:
        return None
    said = subprocess.run([real, "--version"], capture_output=True, text=True).stdout
    version = hashlib.sha256(said.encode()).hexdigest()[:16]
    memory = Memory(folder, real, version)
    words = [sys.executable, "-I", "-S", "-c", _FRONT_CODE, real, version, str(folder)]
    text = _FRONT.format(real=real, words=shlex.join(words))
    front = folder / f"{_PREFIX}{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    # A machine that lost power may have kept an empty file, which would be run.
    if _text_of(front) != text:
        write_atomically(front, text.encode(), mode=0o755)
    envs.set_for_children("DG_JIT_NVCC_COMPILER", str(front))
    return memory


def _read_plan(path: Path) -> list[str] | None:
    try:
        keys: list[str] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return keys


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


@contextmanager
def _planning(folder: str) -> Iterator[None]:
    """Lets the front plan. What the library prints about compilers that fail goes nowhere."""
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
