"""The engine as a server uses it: in its own process, with requests as async generators."""

import asyncio
import dataclasses
import math
import multiprocessing
import signal
import socket
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from vllm.config import VllmConfig
from vllm.engine import process
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.input_processor import InputProcessor, Prompt
from vllm.engine.metrics import Metrics, RequestStats, SchedulerStats
from vllm.engine.output_processor import OutputProcessor, RequestState
from vllm.engine.request import EngineOutput, EngineRequest
from vllm.errors import (
    EngineDeadError,
    KernelFailedError,
    QueueFullError,
    RequestError,
    StoppingError,
    VllmError,
)
from vllm.logger import get_logger
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.utils.processes import ending
from vllm.utils.startup import current_report
from vllm.utils.tokenizer import load_tokenizer

logger = get_logger(__name__)

_STOP_SECONDS = 5.0
# What an engine says before it ends may come after its end was noticed.
_LAST_WORDS_SECONDS = 0.2
# What an engine says that failed by another's fault, or its end, must not come before the cause.
# Ranks that do not answer are waited for a while themselves.
_CAUSE_SECONDS = 4.0
# Of engines whose kernels failed: each fault may hide another one.
_MAX_RESTARTS = 3
# Engines that start before their configuration is read.
_MAX_EARLY = 16


class EngineProcess:
    """An engine's process and the sockets to it. Starts at once; loads while others import.

    stats: of its scheduler after its last step. num_in_flight: sequences that it was given.
    """

    def __init__(self, args: EngineArgs, seat: process.Seat):
        self.seat = seat
        self.stats = SchedulerStats(0, 0, 0.0)
        self.num_in_flight = 0
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
            target=process.run_engine, args=(args, *self.addresses, seat), name="vllm-engine"
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
                await asyncio.sleep(_CAUSE_SECONDS)
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
        self.process.join(_STOP_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.sender.close(linger=0)
        self.context.destroy(linger=0)
        self._folder.cleanup()


@dataclass(slots=True)
class _Flight:
    """A request whose caller waits. `news` is set when its state has changed. is_counted: its
    prompt, in the metrics."""

    state: RequestState
    engine: EngineProcess
    arrival: float
    news: asyncio.Event = field(default_factory=asyncio.Event)
    is_counted: bool = False
    first_token: float | None = None
    last_token: float = 0.0


class AsyncLLM:
    """`generate` yields a request's outputs; closing the generator aborts the request."""

    def __init__(self, args: EngineArgs, max_waiting: int | None = None, metrics_on: bool = True):
        if args.data_parallel_size > _MAX_EARLY:
            args.create_engine_config()  # refuses mistakes before there are that many processes
        self._args = args
        self._engines = _start_engines(args)
        try:
            report = current_report()
            with report.phase("configuration"):
                self.vllm_config: VllmConfig = args.create_engine_config()
            model = self.vllm_config.model_config
            with report.phase("tokenizer"):
                self.tokenizer: Any = None if model.skip_tokenizer_init else load_tokenizer(model)
        except BaseException:
            _kill(self._engines)
            raise
        self.metrics = (
            Metrics(model.served_model_name[0], model.max_model_len) if metrics_on else None
        )
        self.is_dead = False
        self.dead_reason = ""
        self._is_stopping = False
        self._max_waiting = max_waiting
        self._outputs = OutputProcessor(self.tokenizer)
        self._flights: dict[str, _Flight] = {}
        self._kernels: dict[str, Any] = {}
        self._num_sent = 0
        self._dead = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def model_config(self) -> Any:
        return self.vllm_config.model_config

    @property
    def num_unfinished(self) -> int:
        return len(self._flights)

    async def wait_ready(self) -> None:
        """Returns when the model is loaded; raises the error that prevented it."""
        report = current_report()
        report.count_rest("imports")
        with report.phase("waiting for the engine"):
            ready = await self._all_ready()
        self._adopt(ready[0], min(message.max_model_len for message in ready))
        for engine in self._engines:
            self._tasks += [
                asyncio.create_task(self._read_outputs(engine)),
                asyncio.create_task(self._watch_process(engine)),
            ]

    async def _all_ready(self) -> list[process.Ready]:
        """Starts them again where kernels failed that the next start does without."""
        for num_left in range(_MAX_RESTARTS, -1, -1):
            waits = [asyncio.ensure_future(self._wait_ready(engine)) for engine in self._engines]
            try:
                return await asyncio.gather(*waits)
            except KernelFailedError as error:
                if not num_left:
                    raise
                logger.error("%s; starting again", error)
            finally:
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)
            await asyncio.to_thread(_kill, self._engines)
            self._engines = _start_engines(self._args)
        raise AssertionError("the last try returns or raises")

    async def _wait_ready(self, engine: EngineProcess) -> process.Ready:
        try:
            return await engine.wait_ready()
        except VllmError as error:
            raise type(error)(f"{self._name_of(engine)}{error}") from None

    def _adopt(self, ready: process.Ready, max_model_len: int) -> None:
        model = dataclasses.replace(self.model_config, max_model_len=max_model_len)
        self.vllm_config = dataclasses.replace(self.vllm_config, model_config=model)
        self._inputs = InputProcessor(model, self.tokenizer)
        self._kernels = ready.kernels

    async def kernels(self) -> dict[str, Any]:
        """The kernel decisions in force."""
        return self._kernels

    async def wait_dead(self) -> None:
        """Returns when the engine process has died."""
        await self._dead.wait()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields outputs as `sampling_params.output_kind` says, the last one finished.

        Raises RequestError, QueueFullError or EngineDeadError. A consumer that is slow gets
        what has come meanwhile in one piece.
        """
        self._check_alive()
        self.check_queue(sampling_params.n)
        given = await asyncio.to_thread(self._inputs.process, request_id, prompt, sampling_params)
        # Others may have come in, or the engine may have died, since the checks before the wait.
        self._check_alive()
        self.check_queue(sampling_params.n)
        if request_id in self._flights:
            raise RequestError(f"request id {request_id!r} is in use", "request_id")
        # Ties go to the engine that comes first, so a server without load uses one of them.
        engine = min(self._engines, key=lambda engine: engine.num_in_flight)
        state = self._outputs.add(request_id, given, sampling_params)
        flight = self._flights[request_id] = _Flight(state, engine, time.monotonic())
        engine.num_in_flight += sampling_params.n
        try:
            self._hand_out(engine, given.requests)
            while True:
                await flight.news.wait()
                flight.news.clear()
                if flight.state.error is not None:
                    raise flight.state.error
                finished = flight.state.is_finished
                if not finished:
                    self._check_alive()
                if flight.state.has_unread_prompt:
                    await asyncio.to_thread(flight.state.read_prompt)
                if (output := flight.state.take()) is not None:
                    yield output
                if finished:
                    return
        finally:
            self._leave(request_id, flight)

    def _hand_out(self, engine: EngineProcess, requests: list[EngineRequest]) -> None:
        self._num_sent += 1
        number = self._num_sent
        engine.send(process.Add(requests, number))
        if engine.seat.meeting is not None:  # they compute together or not at all
            for other in self._engines:
                if other is not engine:
                    other.send(process.Wake(number))

    def _check_alive(self) -> None:
        if self.is_dead:
            raise (StoppingError if self._is_stopping else EngineDeadError)(self.dead_reason)

    def check_queue(self, num_sequences: int) -> None:
        """QueueFullError where so many more would have to wait for too many; RequestError where
        they would with nobody else here. Sequences beyond those that can run are waiting, wherever
        they are just now."""
        if self._max_waiting is None:
            return
        running = self.vllm_config.scheduler_config.max_num_seqs * len(self._engines)
        if num_sequences > running + self._max_waiting:
            raise RequestError(
                f"{num_sequences} sequences (prompts times n): this server takes at most {running} "
                f"running and {self._max_waiting} waiting (--max-waiting); send fewer at a time"
            )
        in_flight = sum(flight.state.params.n for flight in self._flights.values())
        waiting = in_flight + num_sequences - running
        if waiting > self._max_waiting:
            raise QueueFullError(
                f"{in_flight} sequences are running or waiting already; the limit is {running} "
                f"running and {self._max_waiting} waiting (--max-waiting)",
                retry_after_s=max(1, math.ceil(waiting / max(running, 1))),
            )

    def _leave(self, request_id: str, flight: _Flight) -> None:
        self._flights.pop(request_id, None)
        flight.engine.num_in_flight -= flight.state.params.n
        running = self._outputs.remove(request_id)
        if running and not self.is_dead:
            with suppress(EngineDeadError):
                flight.engine.send(process.Abort(running))
        if self.metrics is not None:
            self.metrics.record_finished(self._request_stats(flight))

    async def _read_outputs(self, engine: EngineProcess) -> None:
        decoder = process.decoder()
        try:
            while True:
                message = decoder.decode(await engine.receiver.recv())
                if isinstance(message, process.Failed):
                    if message.is_of_peer:
                        await asyncio.sleep(_CAUSE_SECONDS)
                    self._die(self._named(engine, message.message))
                    return
                assert isinstance(message, process.Outputs)
                self._take_outputs(engine, message)
                # recv does not wait while messages are queued; others must get their turn.
                await asyncio.sleep(0)
        except Exception as error:
            logger.exception("cannot process the engine's outputs")
            self._die(f"outputs could not be processed ({error!r}); restart the server")

    def _take_outputs(self, engine: EngineProcess, message: process.Outputs) -> None:
        engine.stats = message.stats
        if self.metrics is not None:
            others = [other.stats for other in self._engines if other is not engine]
            self.metrics.record_step(message.stats.with_others(others))
        changed, to_abort = self._outputs.process(message.outputs)
        if to_abort:
            with suppress(EngineDeadError):  # its end is noticed elsewhere, with the cause
                engine.send(process.Abort(to_abort))
        now = time.monotonic()
        for state, output in changed:
            flight = self._flights[state.request_id]
            self._record_tokens(flight, output, now)
            flight.news.set()

    def _record_tokens(self, flight: _Flight, output: EngineOutput, now: float) -> None:
        if self.metrics is None:
            return
        state = flight.state
        if not flight.is_counted and output.error is None:
            flight.is_counted = True
            num_prompt, num_cached = len(state.prompt_token_ids), state.num_cached_tokens
            self.metrics.record_prompt(num_prompt, num_cached)
        self.metrics.record_generated(len(output.token_ids))
        if not output.token_ids:
            return
        if flight.first_token is None:
            flight.first_token = now
            self.metrics.record_first_token(now - flight.arrival)
        else:
            self.metrics.record_inter_token(now - flight.last_token, len(output.token_ids))
        flight.last_token = now

    def _request_stats(self, flight: _Flight) -> RequestStats:
        state, now = flight.state, time.monotonic()
        first = flight.first_token or now
        reasons = {c.finish_reason.value for c in state.choices if c.finish_reason is not None}
        return RequestStats(
            num_prompt_tokens=len(state.prompt_token_ids),
            num_cached_tokens=state.num_cached_tokens,
            num_generation_tokens=state.num_output_tokens,
            e2e_seconds=now - flight.arrival,
            queue_seconds=state.queue_seconds,
            prefill_seconds=max(0.0, first - flight.arrival - state.queue_seconds),
            decode_seconds=max(0.0, flight.last_token - first),
            finish_reason=sorted(reasons)[0] if state.is_finished else "abort",
            max_tokens=state.params.max_tokens,
            n=state.params.n,
        )

    async def _watch_process(self, engine: EngineProcess) -> None:
        await engine.wait_end()
        await asyncio.to_thread(engine.process.join, _STOP_SECONDS)  # its code comes after its end
        code = engine.process.exitcode
        # One that was killed says nothing; one that ends by itself may have, or blame another.
        was_killed = code is not None and code < 0
        await asyncio.sleep(_LAST_WORDS_SECONDS if was_killed else 2 * _CAUSE_SECONDS)
        self._die(self._named(engine, f"the engine process died ({ending(code)})"))

    def _named(self, engine: EngineProcess, reason: str) -> str:
        return f"{self._name_of(engine)}{reason}; restart the server"

    def _name_of(self, engine: EngineProcess) -> str:
        return f"data-parallel engine {engine.seat.rank}: " if len(self._engines) > 1 else ""

    def _die(self, reason: str) -> None:
        """No output comes any more: tells everybody who waits for one. The first reason stays."""
        if not self.is_dead:
            logger.error("%s", reason)
            self._end(reason)

    def _end(self, reason: str) -> None:
        self.is_dead, self.dead_reason = True, reason
        for flight in self._flights.values():
            flight.news.set()
        self._dead.set()

    async def shutdown(self) -> None:
        """Ends the engine processes; requests in flight end with EngineDeadError."""
        # It reads no message before the model is loaded, nor while it waits for one that died.
        is_deaf = self.is_dead or not self._tasks
        if not self.is_dead:
            self._is_stopping = True
            self._end("the server is shutting down")
        for task in self._tasks:
            task.cancel()
        for engine in self._engines:
            try:
                if is_deaf:
                    engine.process.kill()
                elif engine.process.is_alive():
                    engine.send(process.Stop())
            except EngineDeadError:  # it is about to be gone
                engine.process.kill()
        for engine in self._engines:
            await asyncio.to_thread(engine.process.join, _STOP_SECONDS)
            engine.close()


def _start_engines(args: EngineArgs) -> list[EngineProcess]:
    """One for each data-parallel rank. If they compute in lock step, they get a place to meet."""
    num_engines = max(1, args.data_parallel_size)
    if num_engines == 1 or not args.enable_expert_parallel:
        return _started(args, [process.Seat(rank) for rank in range(num_engines)])
    host = _own_address() if args.distributed_executor_backend == "ray" else "127.0.0.1"
    with socket.create_server((host, 0)) as listener:
        meeting = listener.getsockname()
        seats = [process.Seat(0, meeting, listener)]
        seats += [process.Seat(rank, meeting) for rank in range(1, num_engines)]
        return _started(args, seats)


def _started(args: EngineArgs, seats: list[process.Seat]) -> list[EngineProcess]:
    """All or none, also when it is interrupted."""
    engines: list[EngineProcess] = []
    try:
        for seat in seats:
            engines.append(EngineProcess(args, seat))
    except BaseException:
        _kill(engines)
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


def _kill(engines: list[EngineProcess]) -> None:
    for engine in engines:
        engine.process.kill()
    for engine in engines:
        engine.close()
