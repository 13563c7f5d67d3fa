"""SIGTERM while a server starts, also as process 1 of a container."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from slow import quick
from slowness import slowness

from vllm.utils.files import damage

from .serving import COMMAND, environment

_NEW_PIDS = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]


def _can_be_process_1() -> bool:
    try:
        return subprocess.run([*_NEW_PIDS, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, listed.read_text().split()):
            found += [child, *_children(child)]
    return found


def _is_there(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def _stopped(
    command: list[str], when: Callable[[int], bool], log: Path, **variables: str
) -> tuple[int, float, list[int]]:
    """SIGTERM to `command` once `when(its process id)`. Returns its exit code, the seconds until
    then and the processes that it left behind."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment(**variables)
        )
    target = process.pid
    if command[0] == "unshare":  # it is process 1's parent, and passes no signals on
        while not (inside := _children(process.pid)):
            time.sleep(0.001)
        target = inside[0]
    try:
        end = time.monotonic() + 60
        while not when(target):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.005)
        children = _children(target)
        begin = time.monotonic()
        os.kill(target, signal.SIGTERM)
        code = process.wait(30)
        seconds = time.monotonic() - begin
        time.sleep(0.2)  # the kernel ends children right after their parent
        return code, seconds, [pid for pid in children if _is_there(pid)]
    finally:
        process.kill()
        process.wait()


def _after(seconds: float) -> Callable[[int], bool]:
    """Seconds, more on a slow machine, from when the command itself runs: until Python has started
    nobody takes a signal to process 1."""
    return _later(_is_ours, seconds * slowness())


def _is_ours(pid: int) -> bool:
    try:
        return b"vllm" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _when_logged(log: Path, text: str) -> Callable[[int], bool]:
    return lambda pid: text in log.read_text()


def _later(first: Callable[[int], bool], seconds: float) -> Callable[[int], bool]:
    began: list[float] = []

    def condition(pid: int) -> bool:
        if first(pid) and not began:
            began.append(time.monotonic())
        return bool(began) and time.monotonic() - began[0] > seconds

    return condition


def _serve(model: Path | str) -> list[str]:
    return [
        *COMMAND,
        "serve",
        *([str(model)] if model else []),
        "--host",
        "127.0.0.1",
        "--port",
        "0",
    ]


@pytest.mark.parametrize(
    "moment",
    quick([0.3, 1.0, "sampling defaults", "no lossy transform"], [1.0, "sampling defaults"]),
)
@pytest.mark.parametrize("as_process_1", quick([False, True], [True]))
def test_sigterm_ends_a_start_at_any_moment(
    tiny_model: Path, tmp_path: Path, moment: float | str, as_process_1: bool
) -> None:
    """moment: seconds after the command began, or what its log says then."""
    if as_process_1 and not _can_be_process_1():
        pytest.skip("this machine has no user namespaces")
    prefix = _NEW_PIDS if as_process_1 else []
    log = tmp_path / "log"
    when = _when_logged(log, moment) if isinstance(moment, str) else _after(moment)
    code, took, left = _stopped([*prefix, *_serve(tiny_model)], when, log)
    # The start may be over after so many seconds: then it is a stop as any other.
    assert code == (0 if "\nServing " in log.read_text() else 143), log.read_text()
    assert took < 2 * slowness()
    assert left == []
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
def test_sigterm_ends_the_writing_of_the_demo_model_and_leaves_no_half_of_it(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    made = []
    for seconds in (0.3, 0.8, 2.0):
        when = _later(_when_logged(log, "Preparing the demo model"), seconds)
        folder, cache = tmp_path / f"tmp{seconds}", tmp_path / f"cache{seconds}"
        folder.mkdir()
        variables = {"VLLM_CACHE_ROOT": str(cache), "TMPDIR": str(folder)}
        code, took, left = _stopped(_serve(""), when, log, **variables)
        assert code == 143, log.read_text()
        assert took < 2 * slowness()
        assert left == []
        assert "Traceback" not in log.read_text()
        made.append(list((cache / "models").glob("SmolLM2*")))  # whole, on a fast machine
        assert all(damage(model) is None for model in made[-1])
    assert made[0] == []


def test_an_exit_that_compiled_code_turns_into_its_own_error_is_one() -> None:
    code = (
        "import os, signal, sys, time\n"
        "from vllm.entrypoints.cli import main\n"
        "def compiled(*given):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)\n"
        "    except SystemExit:\n"
        "        raise ValueError('of pydantic')\n"
        "main.main = compiled\n"
        "sys.exit(main.program())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, text=True)
    assert (done.returncode, done.stderr) == (143, "")


def test_a_second_sigterm_ends_a_process_that_is_still_cleaning_up(tmp_path: Path) -> None:
    code = (
        "import time; from vllm.utils.interrupts import exit_on_sigterm; exit_on_sigterm()\n"
        "try:\n    print('here', flush=True); time.sleep(60)\n"
        "finally:\n    print('cleaning', flush=True); time.sleep(60)"
    )
    for num_signals, at_most in ((1, 3.0), (2, 1.0)):
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment()
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == b"cleaning\n"
        if num_signals == 2:
            process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 143
        assert time.monotonic() - begin < at_most * slowness()
        process.stdout.close()
