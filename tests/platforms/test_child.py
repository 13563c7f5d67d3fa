"""A child process answers, or ends in whatever way: its parent goes on and knows how."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from vllm.platforms.child import Child, ChildEndedError, run

STAND_INS = Path(__file__).parents[1] / "stand_ins"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.syspath_prepend(str(STAND_INS))


def is_running(marker: str) -> bool:
    """Whether a process has this word in its command line."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "cmdline").read_bytes():
                return True
        except OSError:
            continue
    return False


def wait_until(condition, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_a_function_answers_and_what_it_prints_is_no_answer():
    assert run("child_functions:add", 2, 3, timeout=60) == 5
    assert run("child_functions:add", "a", "b", timeout=60) == "ab"


def test_a_child_reads_nothing_from_stdin():
    assert run("child_functions:read_stdin", timeout=60) == ""


@pytest.mark.parametrize(
    ("name", "arguments", "how"),
    [
        ("fault", (), "was killed by SIGSEGV"),
        ("fail", ("no driver",), "ended with exit code 1: ValueError: no driver"),
        ("absent", (), "ended with exit code 1: AttributeError: "),
    ],
)
def test_a_child_that_ends_says_how_and_its_last_line(name, arguments, how):
    with pytest.raises(ChildEndedError) as error:
        run(f"child_functions:{name}", *arguments, timeout=60)
    assert str(error.value).startswith(how)


@pytest.mark.slow
def test_a_child_that_hangs_is_killed_with_what_it_started(tmp_path):
    marker = f"marker-{os.getpid()}-hangs"
    with pytest.raises(TimeoutError):
        run("child_functions:hang_with_another", marker, timeout=8)
    assert wait_until(lambda: not is_running(marker))


def test_a_kept_child_answers_in_one_process_until_it_ends():
    child = Child("child_functions:echo", "x")
    child.send(1)
    before, message, pid = child.receive(60)
    child.send(2)
    assert (before, message) == ("x", 1) and child.receive(60) == ("x", 2, pid)
    child.send("exit")
    with pytest.raises(ChildEndedError, match="ended with exit code 7: last words"):
        child.receive(60)
    with pytest.raises(ChildEndedError):
        child.send(3)


def test_a_child_outlives_the_thread_that_started_it():
    started = []
    thread = threading.Thread(target=lambda: started.append(Child("child_functions:echo", "x")))
    thread.start()
    thread.join()
    time.sleep(0.5)
    started[0].send(1)
    assert started[0].receive(60)[:2] == ("x", 1)
    started[0].close()


def test_a_child_that_another_thread_closes_has_ended():
    child = Child("child_functions:echo", "x")
    threading.Timer(1, child.close).start()
    with pytest.raises(ChildEndedError, match="SIGKILL"):
        child.receive(60)


def test_a_child_gets_no_more_memory_than_it_may_have():
    child = Child("child_functions:serve_and_allocate", max_memory=256 << 20)
    child.send(1 << 20)
    assert child.receive(60) == 1 << 20
    child.send(1 << 30)
    assert child.receive(60) == "no memory"
    child.close()


def test_a_child_dies_with_its_parent_even_while_it_computes():
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(STAND_INS)!r}]\n"
        "from vllm.platforms.child import Child\n"
        "child = Child('child_functions:echo', 'x')\n"
        "child.send(1)\n"
        "print(child.receive(60)[2], flush=True)\n"
        "Child('vllm.platforms.child:_call', 'child_functions:hang', ()).receive(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()

    def is_gone() -> bool:
        try:
            return "zombie" in Path(f"/proc/{child}/status").read_text()
        except OSError:
            return True

    assert wait_until(is_gone)
