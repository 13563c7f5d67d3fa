"""What compiles in this process, and since when that makes requests wait.

Triton tells a listener of each kernel. The front of nvcc writes a line for each (`memory.py`).
FlashInfer's builds are watched (`flashinfer.py`).
"""

import atexit
import contextlib
import json
import shutil
import tempfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.logger import get_logger

logger = get_logger(__name__)

_MAX_TEXT = 300


@dataclass(frozen=True, slots=True)
class Compilation:
    """compiler: triton, nvcc, flashinfer. kernel: its name, with what it was compiled for."""

    compiler: str
    kernel: str
    seconds: float


class Monitor:
    """Counts what is compiled. Before `serve` that is a part of the start; from then on each is
    told in a warning, and counted by `take`.

    made: before `serve`.
    """

    def __init__(self) -> None:
        self.made: list[Compilation] = []
        self._is_serving = False
        self._num_new = 0
        self._log: Path | None = None
        self._position = 0

    def summary(self) -> str:
        """What was compiled before `serve`; "" for nothing. What compiled side by side counts for
        each."""
        seconds = sum(compilation.seconds for compilation in self.made)
        return f"{len(self.made)} kernels compiled in {seconds:.1f} s" if self.made else ""

    def watch(self, with_triton: bool = True) -> None:
        """A start begins. To be called before the libraries compile anything. with_triton: whether
        it is here and works, since it is imported."""
        self._read_log()
        self.made, self._is_serving, self._num_new = [], False, 0
        if self._log is not None:
            return
        folder = Path(tempfile.mkdtemp(prefix="vllm-nvcc-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self._log = folder / "nvcc.jsonl"
        envs.set_for_children("NVCC_LOG", str(self._log))
        if with_triton:
            self._watch_triton()

    def note(self, compilation: Compilation) -> None:
        if not self._is_serving:
            self.made.append(compilation)
            return
        self._num_new += 1
        logger.warning(
            "Requests waited %.1f s while %s compiled %s, which no warm-up had asked for",
            compilation.seconds, compilation.compiler, compilation.kernel,
        )  # fmt: skip

    def serve(self) -> None:
        """The engine is ready: nothing should compile any more."""
        self._read_log()
        self._is_serving = True

    def take(self) -> int:
        """How many were compiled since the call before, or since `serve`."""
        self._read_log()
        count, self._num_new = self._num_new, 0
        return count

    def _watch_triton(self) -> None:
        knobs = import_module("triton").knobs
        before = knobs.compilation.listener

        def listener(*, src: Any, metadata: Any, times: Any, cache_hit: bool, **more: Any) -> None:
            if before is not None:
                before(src=src, metadata=metadata, times=times, cache_hit=cache_hit, **more)
            if not cache_hit:
                self.note(Compilation("triton", _triton_kernel(src), times.total / 1e6))

        knobs.compilation.listener = listener

    def _read_log(self) -> None:
        """What the front of nvcc wrote since it was read last."""
        if self._log is None:
            return
        # Not there before the first kernel, nor when temporary folders were tidied up.
        with contextlib.suppress(OSError):
            if self._log.stat().st_size > self._position:
                self._note_lines(self._log.read_bytes()[self._position :])

    def _note_lines(self, lines: bytes) -> None:
        lines = lines[: lines.rfind(b"\n") + 1]
        self._position += len(lines)
        for line in lines.splitlines():
            with contextlib.suppress(ValueError):  # cut off by a full disk
                entry = json.loads(line)
                self.note(Compilation("nvcc", entry["kernel"][:_MAX_TEXT], entry["seconds"]))


def _triton_kernel(src: Any) -> str:
    """`name(types of arguments, constants)` of what Triton compiled."""
    name = getattr(src, "name", None) or getattr(getattr(src, "fn", None), "__name__", "a kernel")
    types = ", ".join(f"{key}: {value}" for key, value in getattr(src, "signature", {}).items())
    constants = ", ".join(str(value) for value in getattr(src, "constants", {}).values())
    return f"{name}({types}; {constants})"[:_MAX_TEXT]


MONITOR = Monitor()
"""Of this process: what compiles, compiles for all of it."""
