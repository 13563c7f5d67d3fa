"""The engine process and its messages (msgspec over ZMQ)."""

import dataclasses
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from vllm.core.outputs import EngineOutput, SchedulerOutput
from vllm.core.request import EngineRequest
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.early_start import started_early
from vllm.engine.metrics import SchedulerStats
from vllm.errors import EngineDeadError, KernelFailedError, VllmError
from vllm.executor.messages import failure_of, leave_signals_to_parent
from vllm.logger import get_logger
from vllm.utils.heartbeat import PULSE, Activity, Page
from vllm.utils.processes import die_with_parent
from vllm.utils.startup import current_report, no_collections

logger = get_logger(__name__)

_IDLE_POLL_MS = 1000
# An engine idle for so many polls does what its first request with a grammar would wait for.
_POLLS_OF_REST = 3
# Longest time between messages of a busy engine.
_HEARTBEAT_SECONDS = 1.0
# The client that started the engine.
_PARENT = b""


class Add(msgspec.Struct, tag="add"):
    """number: running count of these messages of one client over all engines."""

    requests: list[EngineRequest]
    number: int


class Wake(msgspec.Struct, tag="wake"):
    """Another data-parallel rank got requests; see DPCoordinator."""

    number: int


class Abort(msgspec.Struct, tag="abort"):
    request_ids: list[str]


class Leave(msgspec.Struct, tag="leave"):
    """A client is gone: its requests are aborted."""

    client: str


class Call(msgspec.Struct, tag="call"):
    """Calls a method of the engine core, one of UTILITIES; Returned has the same number."""

    number: int
    method: str
    arguments: list[Any] = []


class Stop(msgspec.Struct, tag="stop"):
    """Ends the process."""


class Ready(msgspec.Struct, tag="ready"):
    """The model is loaded. max_model_len: as resolved; kernels: what /kernels shows; num_blocks: of
    the KV cache. is_gpu: whether steps run on a GPU. startup: seconds by phase of the start."""

    max_model_len: int
    kernels: dict[str, Any]
    num_blocks: int
    is_gpu: bool = False
    startup: dict[str, float] = {}


class Failed(msgspec.Struct, tag="failed"):
    """The model could not be loaded, or a rank is gone. is_user_error: not a bug. is_of_peer:
    caused by another engine, which reports the cause. may_restart: a restart may succeed."""

    message: str
    is_user_error: bool
    is_of_peer: bool = False
    may_restart: bool = False


class Outputs(msgspec.Struct, tag="outputs"):
    """started: ids of requests whose first step is about to be computed."""

    outputs: list[EngineOutput]
    stats: SchedulerStats
    started: list[str] = []


class Returned(msgspec.Struct, tag="returned"):
    """What a Call returned, or the error that a user can act on."""

    number: int
    value: Any = None
    error: str | None = None


ToEngine = Add | Wake | Abort | Leave | Call | Stop
FromEngine = Ready | Failed | Outputs | Returned

UTILITIES = ("reset_prefix_cache", "sleep", "wake_up", "start_profile", "stop_profile")


@dataclass(frozen=True)
class DPRank:
    """One of `data_parallel_size` engines. rendezvous: address of their store, None where they do
    not step in lock-step; listener: its socket, for the first engine."""

    rank: int = 0
    rendezvous: tuple[str, int] | None = None
    listener: socket.socket | None = None


def run_engine(
    args: EngineArgs, inbox: str, outbox: str, client_address: str, dp_rank: DPRank, page: Page
) -> None:
    """Body of the engine process: loads the model, then serves until told to stop. inbox, outbox:
    ZMQ addresses that the parent has bound; client_address: one to bind for other clients, which
    name themselves by their routing ids. page: of heartbeats. The last message says why the process
    ends."""
    parent = multiprocessing.parent_process()
    die_with_parent(parent.pid if parent is not None else None)
    PULSE.attach(page, 0)
    leave_signals_to_parent()
    context = zmq.Context()
    receiver = context.socket(zmq.PULL)
    sender = context.socket(zmq.PUSH)
    for wire, address in ((receiver, inbox), (sender, outbox)):
        wire.set_hwm(0)
        wire.connect(address)
    clients = context.socket(zmq.ROUTER)
    clients.set_hwm(0)
    clients.bind(client_address)
    loop = _EngineLoop(receiver, sender, clients)
    try:
        with started_early(args, dp_rank.rank), no_collections():
            loop.load(args, dp_rank)
        leave_signals_to_parent()  # Ray takes them over
    except Exception as error:
        is_user_error = isinstance(error, VllmError) and not isinstance(error, EngineDeadError)
        loop.send(_failed(error, traceback.format_exc(), is_user_error))
        context.destroy(linger=2000)
        sys.exit(2 if is_user_error else 1)
    try:
        loop.run()
    except Exception as error:
        if not isinstance(error, VllmError):
            traceback.print_exc()
        loop.send(_failed(error, f"the engine failed: {type(error).__name__}: {error}"))
        context.destroy(linger=2000)
        sys.exit(1)
    loop.core.shutdown()
    context.destroy(linger=0)


def _failed(error: Exception, otherwise: str, is_user_error: bool = False) -> Failed:
    """otherwise: the text for an error without a message of its own."""
    failure = failure_of(error, otherwise)
    may_restart = isinstance(error, KernelFailedError)
    return Failed(failure.text, is_user_error, failure.is_of_peer, may_restart)


class _EngineLoop:
    def __init__(
        self,
        receiver: "zmq.Socket[bytes]",
        sender: "zmq.Socket[bytes]",
        clients: "zmq.Socket[bytes]",
    ):
        self._receiver = receiver
        self._sender = sender
        self._clients = clients
        self._poller = zmq.Poller()
        for wire in (receiver, clients):
            self._poller.register(wire, zmq.POLLIN)
        # By id, which client sent a request; those of the parent are not here.
        self._owners: dict[str, bytes] = {}
        self._waves: dict[bytes, int] = {}
        self._gone: set[bytes] = set()  # names are not used again
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._parent = os.getppid()
        self._last_sent = time.monotonic()
        self._told = (0, 0)

    def send(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            self._told = (message.stats.num_running, message.stats.num_waiting)
        self._last_sent = time.monotonic()
        self._sender.send(self._encoder.encode(message))

    def _send_outputs(self, outputs: list[EngineOutput], started: list[str]) -> None:
        """Each client gets what concerns its requests, the parent all statistics too."""
        stats, owners = self.core.stats(), self._owners
        if not owners:
            self.send(Outputs(outputs, stats, started))
            return
        brief = SchedulerStats(
            stats.num_running,
            stats.num_waiting,
            stats.kv_cache_usage,
            compile_waits=stats.compile_waits,
        )
        parts = defaultdict(lambda: Outputs([], brief), {_PARENT: Outputs([], stats)})
        for name in started:
            parts[owners.get(name, _PARENT)].started.append(name)
        for output in outputs:
            parts[owners.get(output.request_id, _PARENT)].outputs.append(output)
            if output.finish_reason is not None:
                owners.pop(output.request_id, None)
        self.send(parts.pop(_PARENT))
        for owner, part in parts.items():
            self._clients.send_multipart((owner, self._encoder.encode(part)))

    def load(self, args: EngineArgs, dp_rank: DPRank) -> None:
        from vllm.engine.core import EngineCore

        with current_report().phase("configuration"):
            config = args.create_engine_config()
        parallel = dataclasses.replace(config.parallel_config, data_parallel_rank=dp_rank.rank)
        config = dataclasses.replace(config, parallel_config=parallel)
        dp_coordinator = None
        if dp_rank.rendezvous is not None:
            from vllm.distributed import world
            from vllm.distributed.dp_coordinator import DPCoordinator

            if dp_rank.listener is not None:
                self._store = world.host_store(dp_rank.listener)
            else:
                self._store = world.find_store(dp_rank.rendezvous)
            size, timeout = parallel.data_parallel_size, parallel.distributed_timeout_seconds
            dp_coordinator = DPCoordinator(self._store, dp_rank.rank, size, timeout)
        self.core = EngineCore(config, dp_coordinator, dp_rank.rendezvous)
        kernels = self.core.executor.kernels()
        is_gpu = self.core.executor.async_scheduling
        max_model_len = self.core.config.model_config.max_model_len
        num_blocks = self.core.executor.num_blocks
        self.core.on_scheduled = self._on_scheduled
        startup = current_report().phases()
        self.send(Ready(max_model_len, kernels, num_blocks, is_gpu, startup))

    def _on_scheduled(self, scheduled: SchedulerOutput) -> None:
        """Tells of requests that start to run before their step, which may take long or end this
        process."""
        scheduler = self.core.scheduler
        counts = (len(scheduler.running), len(scheduler.waiting))
        started = [new.request.request_id for new in scheduled.scheduled_new_reqs]
        if started or counts != self._told:
            self._send_outputs([], started)

    def run(self) -> None:
        core = self.core
        sent_idle = True
        num_idle = 0
        while True:
            PULSE.step()
            is_busy = core.has_work or core.is_awaited
            if not self._receive(0 if is_busy else _IDLE_POLL_MS):
                return
            had_work = core.has_work
            if had_work or core.is_awaited:
                outputs = core.step()
                is_due = time.monotonic() - self._last_sent > _HEARTBEAT_SECONDS
                if outputs or is_due or (had_work and not core.has_work):
                    self._send_outputs(outputs, [])
                sent_idle, num_idle = False, 0
                continue
            num_idle += 1
            if num_idle == _POLLS_OF_REST:
                core.grammars.prepare()
            if not sent_idle:
                core.check_idle()
                self._send_outputs([], [])
                sent_idle = True

    def _receive(self, timeout_ms: int) -> bool:
        """Handles all queued messages, waiting for the first; False when the process should end."""
        if os.getppid() != self._parent:
            return False
        PULSE.enter(Activity.IDLE if timeout_ms else Activity.STEP)
        has_news = self._poller.poll(timeout_ms)
        PULSE.enter(Activity.STEP)
        if not has_news:
            if timeout_ms and not self.core.is_sleeping:
                self.core.executor.check_alive()
            return True
        for wire, _ in has_news:
            with suppress(zmq.Again):
                while True:
                    *sender, data = wire.recv_multipart(zmq.NOBLOCK)
                    message = self._decoder.decode(data)
                    if isinstance(message, Stop):
                        return False
                    self._act(message, sender[0] if sender else _PARENT)
        return True

    def _act(self, message: Add | Wake | Abort | Leave | Call, client: bytes) -> None:
        if isinstance(message, Abort):
            self._abort(message.request_ids)
            return
        if isinstance(message, Leave):
            self._forget(message.client.encode())
            return
        if client in self._gone:  # on another wire than what says so, and later than that
            return
        if isinstance(message, Call):
            self.send(self._returned(message))
            return
        if self.core.dp_coordinator is not None:
            self._waves[client] = message.number
            self.core.dp_coordinator.start_wave(sum(self._waves.values()))
        if isinstance(message, Add):
            for request in message.requests:
                if client:
                    self._owners[request.request_id] = client
                self.core.add(request)

    def _forget(self, client: bytes) -> None:
        self._gone.add(client)
        if self._waves.pop(client, None) is not None and self.core.dp_coordinator is not None:
            self.core.dp_coordinator.start_wave(sum(self._waves.values()))
        self._abort([name for name, owner in self._owners.items() if owner == client])

    def _abort(self, request_ids: list[str]) -> None:
        self.core.abort(request_ids)
        for name in request_ids:
            self._owners.pop(name, None)

    def _returned(self, call: Call) -> Returned:
        assert call.method in UTILITIES
        try:
            with PULSE.during(Activity.CALL):
                value = getattr(self.core, call.method)(*call.arguments)
        except VllmError as error:
            return Returned(call.number, error=str(error))
        return Returned(call.number, value)


def encode(message: ToEngine) -> bytes:
    return msgspec.msgpack.encode(message)


def decoder() -> "msgspec.msgpack.Decoder[FromEngine]":
    return msgspec.msgpack.Decoder(FromEngine)
