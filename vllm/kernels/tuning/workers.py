"""Processes that kernels are tried in: one may fault or hang, and only its kernel is lost.

Standard library only: torch is imported in the process that is started.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import LinearProblem


@dataclass(frozen=True, slots=True)
class Job:
    """One kernel for one problem. gate: token counts that its results are compared for. tokens:
    those it is timed for, ascending. seconds: after so many no further count is begun. compiles:
    whether its first calls compile."""

    problem: LinearProblem
    candidate: Candidate
    tokens: tuple[int, ...]
    gate: tuple[int, ...]
    version: str
    seconds: float = 10.0
    is_timed: bool = False
    compiles: bool = False

    def __str__(self) -> str:
        return f"{self.problem.size_key}  {self.candidate.backend}"


# Of a failure that says nothing about the kernel: no memory was left, or no process for it began.
MACHINE = "machine"


class JobError(Exception):
    """A job failed. why: `numerics` or `library`, which speaks against its kernel, or MACHINE."""

    def __init__(self, why: str, reason: str):
        super().__init__(reason)
        self.why = why


class StoppedError(Exception):
    """The worker was stopped while it ran a job; that says nothing about the kernel."""


class Channel:
    """The process's end of the line."""

    def __init__(self, connection: Connection):
        self._connection = connection

    def next_job(self) -> Job | None:
        try:
            job: Job = self._connection.recv()
        except EOFError:
            return None
        return job

    def begin(self) -> None:
        """What follows is the doing of kernels."""
        self._connection.send(("begun", 0, 0.0))

    def report(self, num_tokens: int, value: float) -> None:
        self._connection.send(("at", num_tokens, value))

    def finish(self) -> None:
        self._connection.send(("done", 0, 0.0))

    def fail(self, why: str, reason: str) -> None:
        self._connection.send(("failed", why, reason))


class Worker:
    """A process that runs jobs one after another; after a failure the next job gets a new one.

    serve: what the process runs, as `module:function` taking a Channel and device_kind; it is
    imported there. timeout: seconds without a sign of life after which a job counts as hanging.
    """

    def __init__(self, serve: str, device_kind: str, timeout: float):
        self._arguments = (serve, device_kind)
        self._timeout = timeout
        self._is_stopped = False
        self._has_begun = False
        self._lock = threading.Lock()
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def run(self, job: Job) -> list[tuple[int, float]]:
        """What the process reports of a job; JobError for a failure, of whatever kind."""
        reports: list[tuple[int, float]] = []
        try:
            connection = self._started()
            connection.send(job)
            while True:
                if not connection.poll(self._timeout):
                    why = "library" if self._has_begun else MACHINE
                    raise JobError(why, f"hung for {self._timeout:g} s{_place(reports)}")
                kind, first, second = connection.recv()
                if kind == "done":
                    return reports
                if kind == "begun":
                    self._has_begun = True
                    continue
                if kind == "failed":
                    raise JobError(first, second + _place(reports) * (first == "library"))
                reports.append((first, second))
        except (EOFError, OSError):
            if self._is_stopped:
                raise StoppedError from None
            # SIGKILL comes from a system without memory, or from a person.
            is_kernels = self._has_begun and self._exit_code() != -signal.SIGKILL
            why = "library" if is_kernels else MACHINE
            error = JobError(why, f"{self._exit_text()}{_place(reports)}")
            self._end()
            raise error from None
        except BaseException:
            self._end()
            raise

    def stop(self) -> None:
        """For good; from any thread."""
        self._is_stopped = True
        self._end()

    def _end(self) -> None:
        with self._lock:
            process, connection = self._process, self._connection
            self._process = self._connection = None
        if process is not None and process.pid is not None:
            # What it started, such as compilers, belongs to its session.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
        if connection is not None:
            connection.close()

    def _started(self) -> Connection:
        with self._lock:
            if self._is_stopped:
                raise StoppedError
            if self._connection is None:
                spawn = multiprocessing.get_context("spawn")
                self._connection, theirs = spawn.Pipe()
                arguments = (theirs, *self._arguments)
                self._process = spawn.Process(target=_work, args=arguments)
                self._has_begun = False
                self._process.start()
                theirs.close()
            return self._connection

    def _exit_code(self) -> int | None:
        process = self._process
        assert process is not None
        process.join(10)
        return process.exitcode

    def _exit_text(self) -> str:
        code = self._exit_code()
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"


def _place(reports: list[tuple[int, float]]) -> str:
    return f", after M = {reports[-1][0]}" if reports else ""


def _work(connection: Connection, serve: str, device_kind: str) -> None:
    os.setsid()  # an interrupt at the keyboard is for the process that asked, which stops this one
    os.dup2(2, 1)  # what libraries print is no answer
    module, _, function = serve.partition(":")
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more
        getattr(import_module(module), function)(Channel(connection), device_kind)
