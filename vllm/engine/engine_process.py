"""The processes of engines, as the server that starts them sees them."""

import asyncio
import multiprocessing
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import zmq
import zmq.asyncio

from vllm.engine import process
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.metrics import SchedulerStats
from vllm.errors import EngineDeadError, KernelFailedError, VllmError
from vllm.logger import get_logger
from vllm.utils.processes import ending

logger = get_logger(__name__)

STOP_SECONDS = 5.0
# What an engine says that failed by another's fault, or its end, must not come before the cause.
# Ranks that do not answer are waited for a while themselves.
CAUSE_SECONDS = 4.0


class EngineProcess:
    """An engine's process and the sockets to it. Starts at once; loads while others import.

    stats: of its scheduler after its last step. num_in_flight: sequences that it was given.
    num_silent: how often in a row it was found with requests and without a sign of life.
    """

    def __init__(self, args: EngineArgs, dp_rank: process.DPRank):
        self.dp_rank = dp_rank
        self.stats = SchedulerStats(0, 0, 0.0)
        self.num_in_flight = 0
        self.num_silent = 0
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-")
        self.addresses = [f"ipc://{Path(self._folder.name, name)}" for name in ("in", "out")]
        self.context = zmq.asyncio.Context()
        # Not of asyncio: a message that nobody takes would be waited for, and all after it.
        self.sender: zmq.Socket[bytes] = zmq.Context.shadow(self.context).socket(zmq.PUSH)
        self.receiver = self.context.socket(zmq.PULL)
        for wire, address in zip((self.sender, self.receiver), self.addresses):
            wire.set_hwm(0)
            wire.bind(address)
        spawn = multiprocessing.get_context("spawn")
        self.process: BaseProcess = spawn.Process(
            target=process.run_engine, args=(args, *self.addresses, dp_rank), name="vllm-engine"
        )
        with _interrupts_ignored():
            self.process.start()

    def send(self, message: process.ToEngine) -> None:
        """Without waiting, for zmq keeps any number of messages; EngineDeadError where nobody takes
        them any more."""
        try:
            self.sender.send(process.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineDeadError(
                "the engine process takes no messages any more; restart the server"
            ) from None

    async def wait_ready(self) -> process.Ready:
        """Returns when the model is loaded; raises the error that prevented it, later if that is
        another engine's."""
        receive = asyncio.ensure_future(self.receiver.recv())
        end = asyncio.ensure_future(self.wait_end())
        await asyncio.wait((receive, end), return_when=asyncio.FIRST_COMPLETED)
        if not receive.done():
            await asyncio.wait((receive,), timeout=0.5)  # its last words may still be on the way
        end.cancel()
        if not receive.done():
            receive.cancel()
            how = ending(self.process.exitcode)
            raise EngineDeadError(f"the engine process ended while loading ({how})")
        message = process.decoder().decode(receive.result())
        if isinstance(message, process.Failed):
            if message.is_of_peer:
                await asyncio.sleep(CAUSE_SECONDS)
            if message.may_restart:
                raise KernelFailedError(message.message)
            raise (VllmError if message.is_user_error else EngineDeadError)(message.message)
        assert isinstance(message, process.Ready)
        return message

    async def wait_end(self) -> None:
        """Returns when the process is gone."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self.process.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self.process.sentinel)

    def close(self) -> None:
        self.process.join(STOP_SECONDS)
        if self.process.is_alive():
            kill([self])
        self.sender.close(linger=0)
        self.context.destroy(linger=0)
        self._folder.cleanup()


def start_engines(args: EngineArgs) -> list[EngineProcess]:
    """One for each data-parallel rank. If they compute in lock step, they get a place to meet."""
    num_engines = max(1, args.data_parallel_size)
    if num_engines == 1 or not args.enable_expert_parallel:
        return _started(args, [process.DPRank(rank) for rank in range(num_engines)])
    host = _own_address() if args.distributed_executor_backend == "ray" else "127.0.0.1"
    with socket.create_server((host, 0)) as listener:
        rendezvous = listener.getsockname()
        dp_ranks = [process.DPRank(0, rendezvous, listener)]
        dp_ranks += [process.DPRank(rank, rendezvous) for rank in range(1, num_engines)]
        return _started(args, dp_ranks)


def _started(args: EngineArgs, dp_ranks: list[process.DPRank]) -> list[EngineProcess]:
    """All or none, also when it is interrupted."""
    engines: list[EngineProcess] = []
    try:
        for dp_rank in dp_ranks:
            engines.append(EngineProcess(args, dp_rank))
    except BaseException:
        kill(engines)
        close(engines)
        raise
    return engines


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """By a process that is started within, from its first instruction on: Ctrl-C goes to all
    processes of a terminal, and this one sees to the others."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is None:  # somebody's who is not Python
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _own_address() -> str:
    """Under which other machines reach this one; nothing is sent for it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("8.8.8.8", 53))  # any address beyond this machine
        except OSError:  # there is nothing beyond
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def kill(engines: list[EngineProcess]) -> None:
    """Waits for their end, but not for ever for one that its driver does not let go."""
    for engine in engines:
        engine.process.kill()
    for engine in engines:
        engine.process.join(STOP_SECONDS)
        if engine.process.is_alive():
            logger.warning("the engine process %s does not end", engine.process.pid)


def close(engines: list[EngineProcess]) -> None:
    """In the event loop that their sockets belong to, if there is one."""
    for engine in engines:
        engine.close()
