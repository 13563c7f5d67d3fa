"""Runs a named function in a child process: a crash or a hang there harms nothing else.

`run` makes one call in a fresh process; a `Child` is kept and answers several requests. Each child
has a session of its own, so that it is killed together with what it started, such as compilers. It
dies with this process, reads nothing from stdin, and what it prints goes to a file of its own.
"""

import contextlib
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from tempfile import TemporaryFile
from typing import Any

from vllm.utils.processes import die_with_parent, signal_name

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from vllm.platforms.child import _main; _main(int(sys.argv[2]))"
)
# Linux kills a child when the thread that started it ends: this thread ends with the process.
_STARTER = ThreadPoolExecutor(1, thread_name_prefix="start-child")
_TAIL_BYTES, _MAX_LINE = 4096, 200
_EXIT_SECONDS = 10.0


class ChildEndedError(Exception):
    """The process ended without an answer: "was killed by SIGSEGV: last line of its output".

    code: its exit code, negative for a signal.
    """

    def __init__(self, code: int, last_line: str):
        how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"
        super().__init__(f"{how}: {last_line}" if last_line else how)
        self.code = code


def run(function: str, *arguments: Any, timeout: float) -> Any:
    """The result of `function` ("module:name") in a fresh process.

    TimeoutError after `timeout` seconds, ChildEndedError where the process ends first; an exception
    of the function is one of the ways to end.
    """
    with contextlib.closing(Child("vllm.platforms.child:_call", function, arguments)) as child:
        return child.receive(timeout)


class Child:
    """A process that runs `function` ("module:name") with a Connection and `arguments`.

    Everything is pickled. max_memory: bytes of data that it may allocate.
    """

    def __init__(self, function: str, *arguments: Any, max_memory: int | None = None):
        self._channel, theirs = Pipe()
        self._output = TemporaryFile()  # noqa: SIM115
        fcntl.fcntl(self._output, fcntl.F_SETFL, os.O_APPEND)  # it is emptied between requests
        descriptor = theirs.fileno()
        command = [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), str(descriptor)]
        with theirs:
            self._process = _STARTER.submit(
                subprocess.Popen,
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=(descriptor,),
                start_new_session=True,
            ).result()
        self.send((function, arguments, max_memory))

    def send(self, message: Any) -> None:
        """ChildEndedError where the process is gone."""
        self._output.truncate(0)
        try:
            self._channel.send(message)
        except ConnectionError:
            raise self._end() from None

    def receive(self, timeout: float) -> Any:
        """The next message. TimeoutError or ChildEndedError: the child is of no use then."""
        try:
            if self._channel.poll(timeout):
                return self._channel.recv()
        except (EOFError, ConnectionError):
            raise self._end() from None
        raise TimeoutError

    def close(self) -> None:
        """Kills the process and what it started; from any thread, also while another receives."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _end(self) -> ChildEndedError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_SECONDS)
        self.close()
        return ChildEndedError(self._process.returncode, self._last_line())

    def _last_line(self) -> str:
        output = self._output.fileno()
        start = max(0, os.fstat(output).st_size - _TAIL_BYTES)
        text = os.pread(output, _TAIL_BYTES, start).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1][:_MAX_LINE] if lines else ""


# ---------------------------------------------------------------- in the child


def requests(channel: Connection) -> Iterator[Any]:
    """What the parent sends, until it closes its end."""
    with contextlib.suppress(EOFError):
        while True:
            yield channel.recv()


def _main(descriptor: int) -> None:
    die_with_parent()
    channel = Connection(descriptor)
    function, arguments, max_memory = channel.recv()
    if max_memory is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (max_memory, max_memory))
    with contextlib.suppress(ConnectionError):  # the parent is gone
        _resolve(function)(channel, *arguments)
    os._exit(0)  # a library may crash in what it runs at exit, after it has worked


def _call(channel: Connection, function: str, arguments: tuple[Any, ...]) -> None:
    channel.send(_resolve(function)(*arguments))


def _resolve(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    resolved: Callable[..., Any] = getattr(import_module(module), name)
    return resolved
