"""The engine as a server uses it: in its own process, with requests as async generators."""

import asyncio
import dataclasses
import math
import multiprocessing
import tempfile
import time
from collections.abc import AsyncGenerator
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
from vllm.engine.metrics import Metrics, RequestStats
from vllm.engine.output_processor import OutputProcessor, RequestState
from vllm.engine.request import EngineOutput
from vllm.errors import EngineDeadError, QueueFullError, RequestError, VllmError
from vllm.logger import get_logger
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.utils.tokenizer import load_tokenizer

logger = get_logger(__name__)

_STOP_SECONDS = 5.0


class EngineProcess:
    """The engine's process and the sockets to it. Starts at once; loads while others import."""

    def __init__(self, args: EngineArgs):
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-")
        self.addresses = [f"ipc://{Path(self._folder.name, name)}" for name in ("in", "out")]
        self.context = zmq.asyncio.Context()
        self.sender = self.context.socket(zmq.PUSH)
        self.receiver = self.context.socket(zmq.PULL)
        for socket, address in zip((self.sender, self.receiver), self.addresses):
            socket.set_hwm(0)
            socket.bind(address)
        spawn = multiprocessing.get_context("spawn")
        self.process: BaseProcess = spawn.Process(
            target=process.run_engine, args=(args, *self.addresses), name="vllm-engine"
        )
        self.process.start()

    async def send(self, message: process.ToEngine) -> None:
        await self.sender.send(process.encode(message))

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
        self.context.destroy(linger=0)
        self._folder.cleanup()


@dataclass(slots=True)
class _Flight:
    """A request whose caller waits. `news` is set when its state has changed."""

    state: RequestState
    arrival: float
    news: asyncio.Event = field(default_factory=asyncio.Event)
    first_token: float | None = None
    last_token: float = 0.0


class AsyncLLM:
    """`generate` yields a request's outputs; closing the generator aborts the request."""

    def __init__(self, args: EngineArgs, max_waiting: int | None = None, metrics_on: bool = True):
        self._engine = EngineProcess(args)
        try:
            self.vllm_config: VllmConfig = args.create_engine_config()
            model = self.vllm_config.model_config
            self.tokenizer: Any = None if model.skip_tokenizer_init else load_tokenizer(model)
        except BaseException:
            self._engine.process.kill()
            self._engine.close()
            raise
        self.metrics = (
            Metrics(model.served_model_name[0], model.max_model_len) if metrics_on else None
        )
        self.is_dead = False
        self.dead_reason = ""
        self._max_waiting = max_waiting
        self._outputs = OutputProcessor(self.tokenizer)
        self._flights: dict[str, _Flight] = {}
        self._kernels: dict[str, Any] = {}
        self._num_waiting = 0
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
        receive = asyncio.ensure_future(self._engine.receiver.recv())
        end = asyncio.ensure_future(self._engine.wait_end())
        await asyncio.wait((receive, end), return_when=asyncio.FIRST_COMPLETED)
        if not receive.done():
            await asyncio.wait((receive,), timeout=0.5)  # its last words may still be on the way
        end.cancel()
        if not receive.done():
            receive.cancel()
            code = self._engine.process.exitcode
            raise EngineDeadError(f"the engine process ended while loading (exit code {code})")
        decoder = process.decoder()
        message = decoder.decode(receive.result())
        if isinstance(message, process.Failed):
            raise (VllmError if message.is_user_error else EngineDeadError)(message.message)
        assert isinstance(message, process.Ready)
        self._adopt(message)
        self._tasks = [
            asyncio.create_task(self._read_outputs()),
            asyncio.create_task(self._watch_process()),
        ]

    def _adopt(self, ready: process.Ready) -> None:
        model = dataclasses.replace(self.model_config, max_model_len=ready.max_model_len)
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
        self._check_queue(sampling_params.n)
        given = await asyncio.to_thread(self._inputs.process, request_id, prompt, sampling_params)
        # Others may have come in, or the engine may have died, since the checks before the wait.
        self._check_alive()
        self._check_queue(sampling_params.n)
        if request_id in self._flights:
            raise RequestError(f"request id {request_id!r} is in use", "request_id")
        flight = _Flight(self._outputs.add(request_id, given, sampling_params), time.monotonic())
        self._flights[request_id] = flight
        try:
            await self._engine.send(process.Add(given.requests))
            while True:
                await flight.news.wait()
                flight.news.clear()
                if flight.state.error is not None:
                    raise RequestError(flight.state.error)
                finished = flight.state.is_finished
                if not finished:
                    self._check_alive()
                if (output := flight.state.take()) is not None:
                    yield output
                if finished:
                    return
        finally:
            self._leave(request_id, flight)

    def _check_alive(self) -> None:
        if self.is_dead:
            raise EngineDeadError(self.dead_reason)

    def _check_queue(self, num_sequences: int) -> None:
        """Sequences beyond those that can run are waiting, wherever they are just now."""
        if self._max_waiting is None:
            return
        running = self.vllm_config.scheduler_config.max_num_seqs
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
        running = self._outputs.remove(request_id)
        if running and not self.is_dead:
            # zmq queues without blocking (no high-water mark), also from a generator being closed.
            self._engine.sender.send(process.encode(process.Abort(running)))
        if self.metrics is not None:
            self.metrics.record_finished(self._request_stats(flight))

    async def _read_outputs(self) -> None:
        decoder = process.decoder()
        try:
            while True:
                message = decoder.decode(await self._engine.receiver.recv())
                assert isinstance(message, process.Outputs)
                await self._take_outputs(message)
                # recv does not wait while messages are queued; others must get their turn.
                await asyncio.sleep(0)
        except Exception as error:
            logger.exception("cannot process the engine's outputs")
            self._die(f"outputs could not be processed ({error!r}); restart the server")

    async def _take_outputs(self, message: process.Outputs) -> None:
        if self.metrics is not None:
            self.metrics.record_step(message.stats)
        changed, to_abort = self._outputs.process(message.outputs)
        if to_abort:
            await self._engine.send(process.Abort(to_abort))
        now = time.monotonic()
        for state, output in changed:
            flight = self._flights[state.request_id]
            self._record_tokens(flight, output, now)
            flight.news.set()

    def _record_tokens(self, flight: _Flight, output: EngineOutput, now: float) -> None:
        if not output.token_ids or self.metrics is None:
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

    async def _watch_process(self) -> None:
        await self._engine.wait_end()
        code = self._engine.process.exitcode
        self._die(f"the engine process died (exit code {code}); restart the server")
        logger.error("%s", self.dead_reason)

    def _die(self, reason: str) -> None:
        """No output comes any more: tells everybody who waits for one."""
        self.is_dead, self.dead_reason = True, reason
        for flight in self._flights.values():
            flight.news.set()
        self._dead.set()

    async def shutdown(self) -> None:
        """Ends the engine process; requests in flight end with EngineDeadError."""
        if not self.is_dead:
            self._die("the server is shutting down")
        is_loading = not self._tasks
        for task in self._tasks:
            task.cancel()
        engine = self._engine
        if is_loading:
            engine.process.kill()  # it reads no message before the model is loaded
        elif engine.process.is_alive():
            await engine.send(process.Stop())
        await asyncio.to_thread(engine.process.join, _STOP_SECONDS)
        engine.close()
