"""Ranks in other processes, as the engine sees them: a connection to each."""

import os
import pickle
import socket
import struct
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, cast

from torch import Tensor

from vllm.config import VllmConfig
from vllm.core.scheduler import Step
from vllm.errors import EngineDeadError, VllmError
from vllm.executor.base import Address
from vllm.executor.messages import (
    Failure,
    Launch,
    ShowKernels,
    Start,
    Started,
    Stop,
    TakeResult,
)
from vllm.executor.uniproc import engine_layout
from vllm.worker.kv_cache import fit_max_model_len
from vllm.worker.model_runner import StepResult

# How long ranks get to say why a peer of theirs failed, and to end when they are told to.
_CAUSE_SECONDS = 3.0
_STOP_SECONDS = 5.0


class Process(Protocol):
    """A rank's process, wherever it runs."""

    def end(self, timeout: float) -> str:
        """How it ended, for people: `killed by SIGKILL`; waits for it."""
        ...

    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs. device_index: its GPU there. num_neighbours: ranks on that machine."""

    connection: Connection
    process: Process
    device_index: int
    num_neighbours: int


class Launcher(Protocol):
    def host(self) -> str:
        """The address under which ranks reach this machine."""
        ...

    def launch(self, ranks: range) -> list[Place]:
        """Starts processes that run `worker.run` on their end of a connection. ranks: of this
        engine, among those of all engines."""
        ...

    def close(self) -> None:
        """Frees what it holds for ranks that have ended."""
        ...


class _Result:
    def __init__(self, executor: "WorkersExecutor"):
        self._executor = executor

    def result(self) -> StepResult:
        return self._executor.take_result()


class WorkersExecutor:
    """One message to every rank a step, and one from the rank that answers for them."""

    def __init__(self, config: VllmConfig, launcher: Launcher, meeting: Address | None):
        from vllm.distributed import world

        self._launcher = launcher
        parallel = config.parallel_config
        num_ranks = parallel.num_engine_ranks
        self._layouts = [engine_layout(config, rank) for rank in range(num_ranks)]
        self._output = next(i for i, layout in enumerate(self._layouts) if layout.is_output)
        self._timeout = parallel.distributed_timeout_seconds
        if meeting is None:
            listener = world.listen(launcher.host())
            meeting = listener.getsockname()[:2]
            self._store = world.host_store(listener)
        first = parallel.data_parallel_rank * num_ranks
        try:
            self._places = launcher.launch(range(first, first + num_ranks))
        except BaseException:
            launcher.close()
            raise
        self._connections = [place.connection for place in self._places]
        for connection in self._connections:
            _limit_sending(connection, self._timeout)
        self.shutdown = weakref.finalize(self, _shut_down, self._places, launcher)
        try:
            started = self._start(config, meeting)
        except BaseException:
            self._kill()
            raise
        self.num_blocks = started[0].num_blocks
        self.runs_ahead = started[0].runs_ahead
        self.config = fit_max_model_len(config, self.num_blocks, started[0].device_kind)

    def _start(self, config: VllmConfig, meeting: Address) -> list[Started]:
        for layout, place in zip(self._layouts, self._places):
            self._send(
                [place.connection],
                Start(config, layout, place.device_index, place.num_neighbours, meeting),
            )
        return self._gather()

    def _gather(self) -> list[Any]:
        """What each rank says next, however long that takes."""
        found: dict[Connection, Any] = {}
        while len(found) < len(self._connections):
            silent = [c for c in self._connections if c not in found]
            for connection in _with_news(silent):
                message = found[connection] = self._read(connection)
                if isinstance(message, Failure):
                    raise self._cause(self._connections.index(connection), message)
        return [found[connection] for connection in self._connections]

    def launch(self, step: Step, bitmasks: dict[str, Tensor]) -> _Result:
        self._send(self._connections, Launch(step, bitmasks))
        return _Result(self)

    def take_result(self) -> StepResult:
        if self.runs_ahead:
            self._send(self._connections, TakeResult())
        result: StepResult = self._receive(self._output)
        return result

    def kernels(self) -> dict[str, Any]:
        self._send(self._connections[:1], ShowKernels())
        shown: dict[str, Any] = self._receive(0)
        return shown

    def check_alive(self) -> None:
        """A rank that waits for a step has nothing to say, so what it says is that it ended."""
        if _with_news(self._connections, 0):
            raise self._cause()

    def _send(self, connections: Sequence[Connection], message: object) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for connection in connections:
            try:
                connection.send_bytes(data)
            except BlockingIOError:
                raise self._cause(hanging=self._connections.index(connection)) from None
            except OSError:
                raise self._cause() from None

    def _receive(self, index: int) -> Any:
        """What rank `index` of this engine says next. All others have nothing to say, unless they
        fail."""
        wanted = self._connections[index]
        ready = _with_news(self._connections, self._timeout + _STOP_SECONDS)
        if not ready:
            self._kill()
            raise EngineDeadError(
                f"{self._layouts[index]} gave no answer within {self._timeout:g} s "
                f"(--distributed-timeout-seconds)"
            )
        if wanted not in ready:
            raise self._cause()
        message = self._read(wanted)
        if isinstance(message, Failure):
            raise self._cause(index, message)
        return message

    def _read(self, connection: Connection) -> Any:
        """A message, or a Failure that says how the rank ended without one."""
        try:
            return connection.recv()
        except (EOFError, OSError):
            place = self._places[self._connections.index(connection)]
            return Failure(place.process.end(_STOP_SECONDS), error_type="EngineDeadError")

    def _cause(
        self, index: int | None = None, failure: Failure | None = None, hanging: int | None = None
    ) -> VllmError:
        """Why the first of the ranks that failed did; ends all of them. hanging: one that did not
        take a message in time.

        One that failed by another's fault tells of that one, which may still have to be heard.
        """
        found = {} if index is None or failure is None else {index: failure}
        end = time.monotonic() + _CAUSE_SECONDS
        while all(failure.is_of_peer for failure in found.values()):
            silent = [c for i, c in enumerate(self._connections) if i not in found]
            ready = _with_news(silent, max(0.0, end - time.monotonic())) if silent else []
            if not ready:
                break
            for connection in ready:
                message = self._read(connection)
                if isinstance(message, Failure):
                    found[self._connections.index(connection)] = message
        self._kill()
        culprits = [i for i, failure in found.items() if not failure.is_of_peer]
        unheard = [str(layout) for i, layout in enumerate(self._layouts) if i not in found]
        if hanging is not None and not culprits:
            unheard = [str(self._layouts[hanging])]
        if unheard and not culprits:  # who waited for them in vain has spoken
            heard = "; ".join(f"{self._layouts[i]}: {f.text}" for i, f in found.items())
            limit = f" within {self._timeout:g} s (--distributed-timeout-seconds)"
            return EngineDeadError(
                f"{', '.join(unheard)} gave no answer{limit if hanging is not None else ''}"
                f"{heard and f'; {heard}'}"
            )
        index = culprits[0] if culprits else next(iter(found))
        return found[index].as_error(self._layouts[index])

    def _kill(self) -> None:
        for place in self._places:
            place.process.kill()
        self.shutdown()


def _limit_sending(connection: Connection, seconds: float) -> None:
    """A message that the other end does not take in that time is an OSError: it hangs, and a large
    one does not fit what the system keeps for it."""
    whole, part = divmod(seconds, 1.0)
    timeval = struct.pack("@ll", int(whole), int(part * 1e6) or int(whole == 0))
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


def _shut_down(places: list[Place], launcher: Launcher) -> None:
    for place in places:
        try:
            place.connection.send(Stop())
        except OSError:
            continue
    end = time.monotonic() + _STOP_SECONDS
    for place in places:
        place.process.end(max(0.0, end - time.monotonic()))
        place.process.kill()
        place.connection.close()
    launcher.close()


def _with_news(connections: Sequence[Connection], seconds: float | None = None) -> list[Connection]:
    """Those that have something to be read, or whose other end is gone; waits for the first."""
    return cast("list[Connection]", wait(connections, seconds))
