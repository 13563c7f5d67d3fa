"""Counts compilations, and warns of those that delay requests.

Triton calls a listener for each kernel. The nvcc front writes a line for each (`nvcc_cache.py`).
FlashInfer's builds are wrapped (`flashinfer.py`).
"""

import atexit
import contextlib
import json
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.logger import get_logger
from vllm.utils.heartbeat import PULSE

logger = get_logger(__name__)

_MAX_TEXT = 300


@dataclass(frozen=True, slots=True)
class Compilation:
    """compiler: triton, nvcc, flashinfer. kernel: its name, with what it was compiled for. end: by
    time.time."""

    compiler: str
    kernel: str
    seconds: float
    end: float = field(default_factory=time.time, compare=False)


class Monitor:
    """Counts compilations: those before `serve` are `made`, each later one is a warning."""

    def __init__(self) -> None:
        self.made: list[Compilation] = []
        self._is_serving = False
        self._new: list[Compilation] = []
        self._log: Path | None = None
        self._position = 0

    def summary(self) -> str:
        """What was compiled before `serve`; "" for nothing. Seconds of parallel compilations add
        up."""
        seconds = sum(compilation.seconds for compilation in self.made)
        return f"{len(self.made)} kernels compiled in {seconds:.1f} s" if self.made else ""

    def watch(self, with_triton: bool = True) -> None:
        """Call it at the beginning of a start, before libraries compile. with_triton: imports
        Triton to listen to it."""
        self._read_log()
        self.made, self._is_serving, self._new = [], False, []
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
        self._new.append(compilation)
        PULSE.step()  # the step is long, but goes on
        logger.warning(
            "Requests waited %.1f s while %s compiled %s, which the warm-up did not cover",
            compilation.seconds, compilation.compiler, compilation.kernel,
        )  # fmt: skip

    def serve(self) -> None:
        """Call it when the engine is ready: from now on nothing should compile."""
        self._read_log()
        self._is_serving = True

    def take(self) -> list[Compilation]:
        """Compilations since the previous call, or since `serve`."""
        self._read_log()
        new, self._new = self._new, []
        return new

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
        """Reads the lines that the nvcc front has appended."""
        if self._log is None:
            return
        # Not there before the first kernel, nor when temporary folders were tidied up.
        lines = b""
        with contextlib.suppress(OSError):
            if self._log.stat().st_size > self._position:
                lines = self._log.read_bytes()[self._position :]
        lines = lines[: lines.rfind(b"\n") + 1]
        self._position += len(lines)
        for line in lines.splitlines():
            with contextlib.suppress(ValueError):  # cut off by a full disk
                entry = json.loads(line)
                name = entry["kernel"][:_MAX_TEXT]
                self.note(Compilation("nvcc", name, entry["seconds"], entry["end"]))


def _triton_kernel(src: Any) -> str:
    """`name(types of arguments, constants)` of what Triton compiled."""
    name = getattr(src, "name", None) or getattr(getattr(src, "fn", None), "__name__", "a kernel")
    types = ", ".join(f"{key}: {value}" for key, value in getattr(src, "signature", {}).items())
    constants = ", ".join(str(value) for value in getattr(src, "constants", {}).values())
    return f"{name}({types}; {constants})"[:_MAX_TEXT]


MONITOR = Monitor()
"""One per process, because the libraries' hooks are."""
