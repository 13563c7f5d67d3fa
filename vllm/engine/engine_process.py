"""Engine processes, as the server starts and addresses them."""

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

from vllm import envs
from vllm.engine import process
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.metrics import SchedulerStats
from vllm.errors import EngineDeadError, KernelFailedError, VllmError
from vllm.logger import get_logger
from vllm.utils.heartbeat import Page
from vllm.utils.processes import ending

logger = get_logger(__name__)

STOP_SECONDS = 5.0
# Delay of a failure that a peer caused, so that the peer's own report comes first. Ranks wait some
# time for unresponsive peers themselves.
CAUSE_SECONDS = 4.0
# Beyond the devices of any machine it is a mistake.
_MAX_LOCAL_RANKS = 1024


class EngineProcess:
    """An engine's process and its sockets. Starts at once, and loads while the server imports.

    stats: of its scheduler after the last step. num_in_flight: sequences sent to it. page: of the
    heartbeats of this process and its local ranks. why_killed: by the server; "" where it was not.
    client_address: where other clients than this process find it, once it has loaded the model.
    """

    def __init__(self, args: EngineArgs, dp_rank: process.DPRank):
        self.dp_rank = dp_rank
        self.stats = SchedulerStats(0, 0, 0.0)
        self.num_in_flight = 0
        self.why_killed = ""
        self.page = Page(1 + num_local_ranks(args))
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-")
        inbox, outbox, self.client_address = (
            f"ipc://{Path(self._folder.name, name)}" for name in ("in", "out", "clients")
        )
        self.context = zmq.asyncio.Context()
        # Not an asyncio socket: sending must not wait for the receiver.
        self.sender: zmq.Socket[bytes] = zmq.Context.shadow(self.context).socket(zmq.PUSH)
        self.receiver = self.context.socket(zmq.PULL)
        for wire, address in ((self.sender, inbox), (self.receiver, outbox)):
            wire.set_hwm(0)
            wire.bind(address)
        spawn = multiprocessing.get_context("spawn")
        self.process: BaseProcess = spawn.Process(
            target=process.run_engine,
            args=(args, inbox, outbox, self.client_address, dp_rank, self.page),
            name="vllm-engine",
        )
        with interrupts_ignored():
            self.process.start()

    @property
    def rank(self) -> int:
        return self.dp_rank.rank

    @property
    def is_lockstep(self) -> bool:
        return self.dp_rank.rendezvous is not None

    def send(self, message: process.ToEngine) -> None:
        """Does not block: ZMQ queues any number of messages. EngineDeadError where the receiver is
        gone, or this end is closed."""
        try:
            self.sender.send(process.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            raise EngineDeadError(
                "the engine process takes no messages any more; restart the server"
            ) from None

    async def wait_ready(self) -> process.Ready:
        """Returns when the model is loaded; raises the error that prevented it, delayed where a
        peer caused it."""
        receive = asyncio.ensure_future(self.receiver.recv())
        end = asyncio.ensure_future(self.wait_end())
        await asyncio.wait((receive, end), return_when=asyncio.FIRST_COMPLETED)
        if not receive.done():
            await asyncio.wait((receive,), timeout=0.5)  # its last message may still be on the way
        end.cancel()
        if not receive.done():
            receive.cancel()
            how = self.why_killed or ending(self.process.exitcode)
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
        self.page.close()
        self._folder.cleanup()


def num_local_ranks(args: EngineArgs) -> int:
    """Rank processes of one engine on this machine, beside that of the engine. The arguments are
    not validated yet: 0 for what is going to be refused."""
    if args.distributed_executor_backend == "ray":
        return 0
    count = args.tensor_parallel_size * args.pipeline_parallel_size
    return count if 1 < count <= _MAX_LOCAL_RANKS else 0


def start_engines(args: EngineArgs) -> list[EngineProcess]:
    """One engine per data-parallel rank, with a rendezvous address where they step in lock-step."""
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
    """Starts all or none, also when interrupted."""
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
def interrupts_ignored() -> Iterator[None]:
    """SIGINT is ignored by a process started within: Ctrl-C reaches all processes of a terminal,
    and this process stops the others."""
    before = signal.getsignal(signal.SIGINT)  # None: not set by Python
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _own_address() -> str:
    """The address of this node on the network; nothing is sent."""
    if envs.VLLM_HOST_IP is not None:
        return str(envs.VLLM_HOST_IP)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("8.8.8.8", 53))  # any address beyond this machine
        except OSError:  # no network
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def kill(engines: list[EngineProcess]) -> None:
    """Kills the processes and waits for their end, with a timeout: a driver may block one."""
    for engine in engines:
        engine.process.kill()
    for engine in engines:
        engine.process.join(STOP_SECONDS)
        if engine.process.is_alive():
            logger.warning("the engine process %s does not end", engine.process.pid)


def close(engines: list[EngineProcess]) -> None:
    """To be called in the event loop of their sockets, if there is one."""
    for engine in engines:
        engine.close()
