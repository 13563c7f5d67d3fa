"""Tries a library in a process of its own: what it does there, a fault or a hang, harms no other.

A library can install, import, and then kill the process or never return at its first call. The
process imports it and runs its trial; what comes out is a sentence. Trials that passed are
remembered for the same files, torch and chip: they cost a start, which need not be paid at each.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile

from vllm import envs
from vllm.kernels.jit.nvcc import write_whole

TIMEOUT_SECONDS = 60.0
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from vllm.platforms.trial import answer; answer(*sys.argv[2:])"
)


def try_library(
    module: str, archs: tuple[str, ...], timeout: float | None = None
) -> dict[str, str]:
    """`{"version": its own or ""}` for a library that works, `{"broken": why}` for one that fails,
    faults or does not end within `timeout` seconds (TIMEOUT_SECONDS)."""
    timeout = TIMEOUT_SECONDS if timeout is None else timeout
    with TemporaryFile("w+", errors="replace") as err:  # a pipe may be held open by what it starts
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), module, *archs],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            start_new_session=True,  # with the compilers it starts, so that all can be ended
        )
        try:
            out, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return {"broken": f"its trial did not end within {timeout:g} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        answered = out.rpartition("\n")[2]  # what Python prints at its start comes before
        if answered.startswith("{"):
            return {str(key): str(value) for key, value in json.loads(answered).items()}
        err.seek(0)
        return {"broken": _ending(process.returncode, err.read())}


def _ending(code: int, err: str) -> str:
    """How a process ended that gave no answer, with the last thing it said."""
    how = (
        f"was killed by {signal.Signals(-code).name}"
        if code < 0
        else f"ended with exit code {code}"
    )
    said = [line.strip() for line in err.splitlines() if line.strip()]
    return f"its trial {how}" + (f": {said[-1][:200]}" if said else "")


def answer(module: str, *archs: str) -> None:
    """Runs in the process: imports, tries, and prints the result as JSON on what was stdout."""
    from vllm.platforms.libraries import TRIALS, one_line

    with os.fdopen(os.dup(1), "w") as stdout:
        os.dup2(2, 1)  # what a library prints is no answer
        try:
            imported = import_module(module)
            if module in TRIALS:
                TRIALS[module](imported, archs)
            result = {"version": str(getattr(imported, "__version__", ""))}
        except Exception as error:  # whatever a foreign library raises makes it unusable
            result = {"broken": one_line(error)}
        stdout.write(f"\n{json.dumps(result)}")
        stdout.flush()
        os._exit(0)  # a library may fault in what it runs at exit, after it has worked


# ---------------------------------------------------------------- trials that passed


def remembers(key: str) -> bool:
    """Whether a trial passed earlier, for the same `key`."""
    return key in _passed()


def remember(key: str) -> None:
    """A place that cannot be written is no error: the trial then runs again."""
    with _REMEMBERING, contextlib.suppress(OSError):
        text = json.dumps([*_passed(), key][-_MOST_REMEMBERED:], indent=0)
        write_whole(_memory(), text.encode())


def _passed() -> list[str]:
    try:
        found = json.loads(_memory().read_text())
    except (OSError, ValueError):
        return []
    return [key for key in found if isinstance(key, str)] if isinstance(found, list) else []


def _memory() -> Path:
    folder: Path = envs.VLLM_CACHE_ROOT
    return folder / "library_trials.json"


_MOST_REMEMBERED = 64
_REMEMBERING = threading.Lock()  # libraries are tried side by side
