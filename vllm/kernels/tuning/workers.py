"""Child processes that measure kernels: one may crash or hang, and only its kernel is lost."""

import signal
import threading
from typing import Any

from vllm.kernels.evidence.tables import Column, column_text
from vllm.kernels.tuning.jobs import Job, Turns
from vllm.platforms.child import Child, ChildEndedError

# A failure that says nothing about the kernel: out of memory, or its process did not start.
MACHINE = "machine"
_START_SECONDS = 60.0  # torch is imported before a kernel is


class JobError(Exception):
    """A request failed. why: `numerics` or `library`, which speaks against its kernel, or
    MACHINE."""

    def __init__(self, why: str, reason: str):
        super().__init__(reason)
        self.why = why


class StoppedError(Exception):
    """The worker was stopped while it carried out a request."""


Reports = list[tuple[Column, Any]]


class Worker:
    """A child that carries out one request after another; after a failure the next gets a new
    child.

    serve: what it runs, as `module:function` taking a Connection and device_kind. It receives a Job
    or Turns and sends (kind, a, b): `begun` once the device works and what follows is the kernel's
    doing, `at` with a token count and a value, or None for a sign of life, then `done`, or `failed`
    with why and a reason. timeout: seconds without a message after which a kernel counts as
    hanging.
    """

    def __init__(self, serve: str, device_kind: str, timeout: float):
        self._arguments = (serve, device_kind)
        self._timeout = timeout
        self._is_stopped = False
        self._has_begun = False
        self._lock = threading.Lock()
        self._child: Child | None = None

    def run(self, request: Job | Turns) -> Reports:
        """The (token count or step, value) pairs that the child reports; JobError for any
        failure."""
        reports: Reports = []
        try:
            child = self._started()
            child.send(request)
            while True:
                limit = self._timeout if self._has_begun else max(self._timeout, _START_SECONDS)
                kind, first, second = child.receive(limit)
                if kind == "done":
                    return reports
                if kind == "begun":
                    self._has_begun = True
                elif kind == "failed":
                    raise JobError(first, second + _place(reports) * (first == "library"))
                elif second is not None:
                    reports.append((first, second))
        except BaseException as error:
            self._close()
            if not isinstance(error, OSError | ChildEndedError):
                raise
            raise self._failure(error, reports) from None

    def _failure(
        self, error: OSError | ChildEndedError, reports: Reports
    ) -> JobError | StoppedError:
        speaks_against_kernel = self._has_begun
        text = f"hung for {self._timeout:g} s"
        if isinstance(error, OSError) and not isinstance(error, TimeoutError):
            return JobError(MACHINE, f"its process cannot be started: {error}")
        if isinstance(error, ChildEndedError):
            if self._is_stopped:
                return StoppedError()
            # SIGKILL is sent by the out-of-memory killer or by a person.
            speaks_against_kernel &= error.code != -signal.SIGKILL
            text = f"its process {error}"
        return JobError("library" if speaks_against_kernel else MACHINE, text + _place(reports))

    def stop(self) -> None:
        """For good; from any thread."""
        self._is_stopped = True
        self._close()

    def _close(self) -> None:
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.close()

    def _started(self) -> Child:
        with self._lock:
            if self._is_stopped:
                raise StoppedError
            if self._child is None:
                self._has_begun = False
                self._child = Child(*self._arguments)
            return self._child


def _place(reports: Reports) -> str:
    return f", after {column_text(reports[-1][0])}" if reports else ""
