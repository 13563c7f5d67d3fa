"""`make`, and the set-up of `make serve`: what it refuses, shows, and leaves when interrupted. The
whole of it takes minutes and is run by hand."""

import importlib.util
import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tools" / "set_up.py"
# Stands in for pip, whose work takes minutes: it says what pip says, then works for long.
PIP = """
import sys, time
print("Collecting torch==2.13.0")
print("  Downloading torch-2.13.0.whl.metadata (29 kB)")
print("Downloading https://x/torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl (190.1 MB)")
print("Using cached tqdm-4.70.1-py3-none-any.whl (78 kB)")
if "--no-deps" in sys.argv:
    print("Installing collected packages: tqdm, torch")
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(SCRIPT.parent))  # as where it is a program
    spec = importlib.util.spec_from_file_location("set_up", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_make_alone_lists_every_target() -> None:
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony is not None
    listed = set(re.findall(r"^  make (\S+)", done.stdout, re.MULTILINE))
    assert set(phony[1].split()) - {"help"} <= listed
    assert max(map(len, done.stdout.splitlines())) <= 100


# ---------------------------------------------------------------- what it refuses


@pytest.mark.parametrize("version", [(3, 7, 1), (3, 10, 13), (3, 14, 0), (4, 0, 0)])
def test_another_python_is_refused_with_one_that_is_here(version, script, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(script.Refused, match=r"PYTHON=/path/to/python3.13"):
        script.check_python(version, "python3")
    (tmp_path / "python3.13").write_text("#!/bin/sh\nexit 127\n")
    (tmp_path / "python3.13").chmod(0o755)
    (tmp_path / "python3.12").symlink_to(sys.executable)
    text = rf"and python3 is {version[0]}\.{version[1]}: make serve PYTHON=python3.12$"
    with pytest.raises(script.Refused, match=text):
        script.check_python(version, "python3")
    assert script.check_python((3, 12, 1)) is None


def run(*words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    # With options for CMake a wheel in dist/, which needs no compiler, does not count.
    env = {**os.environ, "CMAKE_ARGS": "-Wno-dev", **variables}
    command = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_what_the_machine_lacks_is_told_before_anything_is_made(tmp_path: Path) -> None:
    venv = str(tmp_path / "venv")
    lacks = {
        "no C++ compiler for the CPU kernels: install g++ (Debian": {"PATH": str(tmp_path)},
        "CXX=none is not there": {"CXX": "none"},
        "name one: make serve VLLM_CACHE_ROOT=": {"VLLM_CACHE_ROOT": "/proc/none"},
        "can be written: [Errno 2] No such file or directory: '/proc/.cache'": {
            "HOME": "/proc",
            "XDG_CACHE_HOME": "",
            "VLLM_CACHE_ROOT": "",
        },
    }
    for text, variables in lacks.items():
        done = run("--venv", venv, **variables)
        assert (done.returncode, done.stderr) == (1, "")
        assert done.stdout.startswith("make serve: ") and text in done.stdout
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("--venv", venv, "--port", str(port), VLLM_CACHE_ROOT=str(tmp_path / "cache"))
    assert done.returncode == 1
    assert f"(process {os.getpid()})" in done.stdout and "make serve PORT=" in done.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("ERROR: [Errno 28] No space left on device", "the disk is full"),
        ("ProxyError('Cannot connect to proxy.')", "HTTPS_PROXY, which is http://proxy:1"),
        ("ERROR: No matching distribution found for torch==2.13.0", "at HTTPS_PROXY (now http://p"),
        ("  CMake Error at CMakeLists.txt:3", "the kernels did not compile"),
    ],
)
def test_what_made_pip_fail_is_told_with_its_own_words(line, cause, script, monkeypatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:1")
    text = script._failure(["Collecting torch", line, "note"], Path("set-up.log"))
    assert cause in text and line.strip() in text
    assert text.endswith("All of it: set-up.log")


# ---------------------------------------------------------------- what it shows


def test_packages_are_shown_with_their_sizes_and_pip_is_not(script, tmp_path: Path) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    packages = script.Packages(script.Screen(out), tmp_path / ".unfinished")
    (tmp_path / "kernels-1.0-py3-none-any.whl").write_bytes(bytes(2_000_000))
    lines = [
        "Collecting torch==2.13.0",
        "  Downloading https://x/torch-2.13.0-cp311.whl.metadata (29 kB)",
        "Downloading https://x/torch-2.13.0-cp311.whl (190.1 MB)",
        "Using cached tqdm-4.70.1-py3-none-any.whl (78 kB)",
        f"Processing {tmp_path}/kernels-1.0-py3-none-any.whl",
    ]
    now = [packages.told(line) for line in lines]
    assert now[2:4] == ["downloading torch-2.13.0 (190.1 MB)", "reading tqdm-4.70.1 (0.1 MB)"]
    assert now[:2] == [None, None] and not packages.mark.exists()
    assert packages.told("Installing collected packages: tqdm, torch") == "installing 2 packages"
    assert packages.mark.exists()
    assert packages.told("  [7/31] Building CXX object x.o") == "compiling, 7 of 31"
    assert (packages.count, round(packages.bytes / 1e6)) == (3, 192)
    packages.screen.line("in Zürich")  # which ASCII has not
    out.seek(0)
    shown = [line.split() for line in out.read().splitlines()]
    assert shown == [["torch-2.13.0", "190.1", "MB"],
                     ["kernels-1.0", "2.0", "MB,", "local", "file"], ["in", "Z?rich"]]  # fmt: skip


# ---------------------------------------------------------------- Ctrl-C


@contextmanager
def started(venv: Path, tmp_path: Path, until: str, **variables: str) -> Iterator[subprocess.Popen]:
    """The set-up, once it has written `until`; it must end by itself in 20 s."""
    env = {**os.environ, "VLLM_CACHE_ROOT": str(tmp_path / "cache"), **variables}
    command = [sys.executable, str(SCRIPT), "--venv", str(venv)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert any(until in line for line in process.stdout)
            yield process
            process.wait(20)
        finally:
            process.kill()


def test_ctrl_c_while_the_environment_is_made_leaves_none(tmp_path: Path) -> None:
    venv = tmp_path / "a b" / "venv"
    with started(venv, tmp_path, "Environment ") as process:
        deadline = time.monotonic() + 20
        while not venv.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    assert not venv.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_environment_in_which_pip_was_interrupted_is_made_again(
    number: signal.Signals, script: ModuleType, tmp_path: Path
) -> None:
    venv, pip = tmp_path / "a b" / "venv", tmp_path / "pip"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    pip.mkdir()
    (pip / "__init__.py").touch()
    (pip / "__main__.py").write_text(PIP)
    with started(venv, tmp_path, "torch-2.13.0+cpu", PYTHONPATH=str(tmp_path)) as process:
        deadline = time.monotonic() + 20
        while not (venv / script.MARK).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        begin = time.monotonic()
        process.send_signal(number)
    assert process.returncode == 130
    assert time.monotonic() - begin < 15
    assert venv.exists() and not script.is_whole(venv)


def test_after_a_signal_a_new_environment_is_gone_unless_it_is_whole(script, tmp_path) -> None:
    venv = tmp_path / "venv"
    assert "nothing was made" in script.interrupted(Namespace(venv=venv), False)
    venv.mkdir()
    assert "goes on from here" in script.interrupted(Namespace(venv=venv), False)
    assert venv.exists()
    (venv / script.MARK).touch()
    assert "makes" in script.interrupted(Namespace(venv=venv), True) and venv.exists()
    assert "is removed" in script.interrupted(Namespace(venv=venv), False) and not venv.exists()


def test_what_a_command_has_started_ends_with_it(script, tmp_path) -> None:
    def interrupt(line: str) -> None:
        (tmp_path / "pid").write_text(line)
        raise KeyboardInterrupt

    command = ["sh", "-c", "sleep 60 & echo $!; wait"]
    with pytest.raises(KeyboardInterrupt):
        script.watched(command, script.Screen(io.StringIO()), interrupt, "sleeping")
    process = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    deadline = time.monotonic() + 20
    while process.exists() and " Z " not in process.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not process.exists() or " Z " in process.read_text()
