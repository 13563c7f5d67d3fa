"""The executor of ranks in other processes, with a connection to each."""

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
from vllm.core.outputs import ModelRunnerOutput, SchedulerOutput
from vllm.distributed import world
from vllm.errors import EngineDeadError, VllmError
from vllm.executor import local_ranks, messages
from vllm.executor.base import Address, PendingOutput
from vllm.executor.messages import Failure
from vllm.executor.uniproc import engine_layout
from vllm.kernels.report import json_report
from vllm.kernels.report.report import Report
from vllm.worker.kv_cache import fit_max_model_len

# Time for ranks to report why a peer failed, and to end after `Stop`.
_CAUSE_SECONDS = 3.0
_STOP_SECONDS = 5.0


class Process(Protocol):
    """A rank's process, on any node."""

    def end(self, timeout: float) -> str:
        """Waits for its end; how it ended, such as `killed by SIGKILL`."""
        ...

    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RankHandle:
    """A started rank. device_index: its GPU. num_neighbours: ranks on its node."""

    connection: Connection
    process: Process
    device_index: int
    num_neighbours: int


class Launcher(Protocol):
    def host(self) -> str:
        """The address at which ranks reach this node."""
        ...

    def launch(self, ranks: range) -> list[RankHandle]:
        """Starts processes that run `worker.run` on their end of a connection. ranks: of this
        engine, among those of all engines."""
        ...

    def close(self) -> None:
        """Frees the resources of ranks that have ended."""
        ...


class LocalLauncher:
    """Ranks in processes on this node. num_engines: engines of equal size there."""

    def __init__(self, num_engines: int):
        self._num_engines = num_engines

    def host(self) -> str:
        return "127.0.0.1"

    def launch(self, ranks: range) -> list[RankHandle]:
        num_neighbours = len(ranks) * self._num_engines
        return [RankHandle(*local_ranks.take(rank), rank, num_neighbours) for rank in ranks]

    def close(self) -> None:
        pass


class WorkersExecutor:
    """Sends one message to every rank per step, and receives one from the output rank. It is the
    pending output of its steps: `result` returns that of the oldest one in flight."""

    def __init__(self, config: VllmConfig, launcher: Launcher, rendezvous: Address | None):
        self._launcher = launcher
        parallel = config.parallel_config
        num_ranks = parallel.num_engine_ranks
        self._layouts = [engine_layout(config, rank) for rank in range(num_ranks)]
        self._output = next(i for i, layout in enumerate(self._layouts) if layout.is_output)
        self._timeout = parallel.distributed_timeout_seconds
        if rendezvous is None:
            listener = world.listen(launcher.host())
            rendezvous = listener.getsockname()[:2]
            self._store = world.host_store(listener)
        first = parallel.data_parallel_rank * num_ranks
        try:
            self._handles = launcher.launch(range(first, first + num_ranks))
        except BaseException:
            launcher.close()
            raise
        self._connections = [handle.connection for handle in self._handles]
        self._failures: dict[int, Failure] = {}
        for connection in self._connections:
            _limit_sending(connection, self._timeout)
        self.shutdown = weakref.finalize(self, _shut_down, self._handles, launcher)
        try:
            started = self._start(config, rendezvous)
        except BaseException:
            self._kill()
            raise
        self.num_blocks = started[0].num_blocks
        self.async_scheduling = started[0].async_scheduling
        self.config = fit_max_model_len(config, self.num_blocks, started[0].device_kind)

    def _start(self, config: VllmConfig, rendezvous: Address) -> list[messages.Started]:
        for layout, handle in zip(self._layouts, self._handles):
            neighbours = handle.num_neighbours
            start = messages.Start(config, layout, handle.device_index, neighbours, rendezvous)
            self._send([handle.connection], start)
        found: dict[Connection, Any] = {}  # no timeout: loading takes any time
        while len(found) < len(self._connections):
            silent = [c for c in self._connections if c not in found]
            for connection in _with_news(silent):
                found[connection] = self._read(connection)
                if self._failures:
                    raise self._cause()
        return [found[connection] for connection in self._connections]

    def execute_model(
        self, scheduler_output: SchedulerOutput, bitmasks: dict[str, Tensor]
    ) -> PendingOutput:
        self._send(self._connections, messages.ExecuteModel(scheduler_output, bitmasks))
        return self

    def result(self) -> ModelRunnerOutput:
        if self.async_scheduling:
            self._send(self._connections, messages.GetOutput())
        result: ModelRunnerOutput = self._receive(self._output)
        return result

    def kernels(self) -> dict[str, Any]:
        reports: list[Report] = []
        for index, layout in enumerate(self._layouts):
            if layout.tensor_rank == 0:
                self._send([self._connections[index]], messages.ShowKernels())
                reports.append(self._receive(index))
        return json_report.report(*Report.of_stages(reports))

    def check_alive(self) -> None:
        """An idle rank sends nothing, so any message means that it ended."""
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
        """The next message of rank `index` of this engine. The others send something only when
        they fail."""
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
        if self._failures:
            raise self._cause()
        return message

    def _read(self, connection: Connection) -> Any:
        """A message. A Failure, also for a rank that ended without one, goes to `_failures`."""
        index = self._connections.index(connection)
        try:
            message = connection.recv()
        except (EOFError, OSError):
            ending = self._handles[index].process.end(_STOP_SECONDS)
            message = Failure(ending, error_type="EngineDeadError")
        if isinstance(message, Failure):
            self._failures[index] = message
        return message

    def _cause(self, hanging: int | None = None) -> VllmError:
        """The failure that caused the others; ends all ranks. hanging: a rank that did not accept
        a message in time.

        A rank that failed because of a peer reports first; the peer's own report may follow.
        """
        found = self._failures
        end = time.monotonic() + _CAUSE_SECONDS
        while all(failure.is_of_peer for failure in found.values()):
            silent = [c for i, c in enumerate(self._connections) if i not in found]
            ready = _with_news(silent, max(0.0, end - time.monotonic())) if silent else []
            if not ready:
                break
            for connection in ready:
                self._read(connection)
        self._kill()
        culprits = [i for i, failure in found.items() if not failure.is_of_peer]
        unheard = [str(layout) for i, layout in enumerate(self._layouts) if i not in found]
        if hanging is not None and not culprits:
            unheard = [str(self._layouts[hanging])]
        if unheard and not culprits:  # only their peers have reported
            heard = "; ".join(f"{self._layouts[i]}: {f.text}" for i, f in found.items())
            limit = f" within {self._timeout:g} s (--distributed-timeout-seconds)"
            return EngineDeadError(
                f"{', '.join(unheard)} gave no answer{limit if hanging is not None else ''}"
                f"{heard and f'; {heard}'}"
            )
        index = culprits[0] if culprits else next(iter(found))
        return found[index].as_error(self._layouts[index])

    def _kill(self) -> None:
        for handle in self._handles:
            handle.process.kill()
        self.shutdown()


def _limit_sending(connection: Connection, seconds: float) -> None:
    """Sending raises OSError where a hanging peer does not accept a large message in time."""
    whole, part = divmod(seconds, 1.0)
    timeval = struct.pack("@ll", int(whole), int(part * 1e6) or int(whole == 0))
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


def _shut_down(handles: list[RankHandle], launcher: Launcher) -> None:
    for handle in handles:
        try:
            handle.connection.send(messages.Stop())
        except OSError:
            continue
    end = time.monotonic() + _STOP_SECONDS
    for handle in handles:
        handle.process.end(max(0.0, end - time.monotonic()))
        handle.process.kill()
        handle.connection.close()
    launcher.close()


def _with_news(connections: Sequence[Connection], seconds: float | None = None) -> list[Connection]:
    """Waits for connections that are readable or closed; returns them."""
    return cast("list[Connection]", wait(connections, seconds))
