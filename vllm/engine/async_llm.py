"""The engine client of a server: engines in their own processes, requests as async generators."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.core.request import EngineRequest
from vllm.engine import process
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.engine_calls import EngineCalls
from vllm.engine.engine_process import CAUSE_SECONDS, STOP_SECONDS, EngineProcess, close, kill
from vllm.engine.engines import Engines
from vllm.engine.input_processor import InputProcessor, Prompt, refuse_lora
from vllm.engine.metrics import Metrics
from vllm.engine.output_processor import OutputProcessor, RequestState
from vllm.engine.request_metrics import record_output, request_stats
from vllm.engine.request_traces import RequestTrace, RequestTracer
from vllm.engine.supervision import Supervision
from vllm.engine.tokenizer import load_tokenizer
from vllm.errors import (
    EngineDeadError,
    RequestError,
    RestartingError,
    StoppingError,
)
from vllm.kernels.report import json_report
from vllm.kernels.report.calls import CallCounter
from vllm.logger import get_logger
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.utils.aside import aside
from vllm.utils.processes import ending
from vllm.utils.startup import current_report

logger = get_logger(__name__)

# An engine's last message may arrive after its exit was noticed.
_LAST_MESSAGE_SECONDS = 0.2
# Engines that may start before the configuration is validated.
_MAX_EARLY = 16


@dataclass(slots=True)
class InFlightRequest:
    """A request whose caller waits. unsent: what the engine gets of it, while none of its steps has
    begun: another engine may take it. is_resent: to a second engine. error: why it ends early.
    trace: None where none is sent. updated: set when its state changes."""

    state: RequestState
    engine: EngineProcess
    unsent: list[EngineRequest]
    is_resent: bool = False
    error: EngineDeadError | None = None
    trace: RequestTrace | None = None
    updated: asyncio.Event = field(default_factory=asyncio.Event)


class AsyncLLM(EngineCalls):
    """`generate` yields a request's outputs; closing the generator aborts the request. The model
    loads in processes of its own, which a script must allow for with `if __name__ == "__main__":`;
    the first request waits for it. tracer: gets each request that ends; closed with the engines."""

    tracer: RequestTracer | None = None

    def __init__(self, args: EngineArgs, supervision: Supervision | None = None):
        if args.data_parallel_size > _MAX_EARLY:
            args.create_engine_config()  # raises for mistakes before that many processes start
        self._processes = Engines(args, supervision or Supervision())
        try:
            report = current_report()
            with report.phase("configuration"):
                self.vllm_config: VllmConfig = args.create_engine_config()
            model = self.vllm_config.model_config
            with report.phase("tokenizer"):
                self.tokenizer: Any = None if model.skip_tokenizer_init else load_tokenizer(model)
        except BaseException:
            kill(self._engines)
            close(self._engines)
            raise
        self.metrics = Metrics(model.served_model_name[0], model.max_model_len, len(self._engines))
        self.metrics.on_render = self._record_requests
        self._is_ready = False
        self._is_stopping = False
        self._restart: asyncio.Task[None] | None = None
        self._restart_reason = ""
        self._outputs = OutputProcessor(self.tokenizer)
        self._in_flight: dict[str, InFlightRequest] = {}
        self._kernels: dict[str, Any] = {}
        self._calls = CallCounter()
        self._num_sent = 0
        self._calls_in_flight: dict[tuple[int, int], asyncio.Future[Any]] = {}
        self._num_calls = 0
        super().__init__()
        self._loading = asyncio.Lock()
        self._dead = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._watching: asyncio.Task[None] | None = None

    async def is_tracing_enabled(self) -> bool:
        return self.tracer is not None

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **neutral: Any) -> "AsyncLLM":
        """Starts to load the model. neutral: usage_context and others of upstream's; no effect."""
        return cls(engine_args)

    @property
    def _engines(self) -> list[EngineProcess]:
        return self._processes.all

    @property
    def model_config(self) -> Any:
        return self.vllm_config.model_config

    async def wait_ready(self) -> None:
        """Returns when the model is loaded; raises the error that prevented it."""
        report = current_report()
        report.count_rest("imports")
        if self._watching is None:
            self._watching = asyncio.create_task(self._processes.watch())
        with report.phase("waiting for the engine"):
            ready = await self._processes.load()
        self._serve(ready)
        self.metrics.record_startup("server", report.phases())

    def _serve(self, ready: list[process.Ready]) -> None:
        self._is_ready = True
        max_model_len = min(message.max_model_len for message in ready)
        model = dataclasses.replace(self.model_config, max_model_len=max_model_len)
        self.vllm_config = dataclasses.replace(self.vllm_config, model_config=model)
        self._inputs = InputProcessor(model, self.tokenizer)
        self._kernels = ready[0].kernels
        self.metrics.record_cache_config(self.vllm_config.cache_config, ready[0].num_blocks)
        for engine, message in zip(self._engines, ready):
            self.metrics.record_startup(f"engine {engine.dp_rank.rank}", message.startup)
            self._tasks += [
                asyncio.create_task(self._read_outputs(engine)),
                asyncio.create_task(self._watch_process(engine)),
            ]

    async def _when_ready(self) -> None:
        """As `wait_ready`, by whoever needs the engine first."""
        if not self._is_ready and not self.is_dead:
            async with self._loading:
                if not self._is_ready and not self.is_dead:
                    await self.wait_ready()

    async def call_engines(self, method: str, *arguments: Any) -> list[Any]:
        """What `method` of every engine core returns, one of `process.UTILITIES`; RequestError for
        what it refuses."""
        await self._when_ready()
        self._check_open()
        self._num_calls += 1
        number, loop = self._num_calls, asyncio.get_running_loop()
        waits = []
        for engine in self._engines:
            waiting = self._calls_in_flight[(engine.dp_rank.rank, number)] = loop.create_future()
            waits.append(waiting)
            engine.send(process.Call(number, method, [*arguments]))
        return await asyncio.gather(*waits)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests: their last output has the finish_reason `abort`. Unknown ids are none."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if (in_flight := self._in_flight.get(name)) is not None:
                running = in_flight.state.abort()
                with suppress(EngineDeadError):
                    in_flight.engine.send(process.Abort(running))
                in_flight.updated.set()

    async def get_tokenizer(self) -> Any:
        return self.tokenizer

    async def get_model_config(self) -> Any:
        return self.model_config

    async def get_vllm_config(self) -> VllmConfig:
        return self.vllm_config

    async def check_health(self) -> None:
        """Raises EngineDeadError where the engine has died, is being started again, is stopped or
        stuck."""
        self._check_open()
        if self.trouble:
            raise EngineDeadError(self.trouble)

    @property
    def trouble(self) -> str:
        """Why no requests are answered at the moment, as far as engines are the reason: which
        process is stopped or stuck, since when and doing what. "" where they are."""
        if self.is_dead:
            return self.dead_reason
        if self._restart is not None:
            return self._restart_reason
        return "; ".join(self._processes.troubles.values())

    @property
    def errored(self) -> bool:
        return self.is_dead and not self._is_stopping

    @property
    def dead_error(self) -> EngineDeadError:
        return EngineDeadError(self.dead_reason)

    @property
    def max_num_seqs(self) -> int:
        """Sequences that all engines run at once."""
        return int(self.vllm_config.scheduler_config.max_num_seqs) * len(self._engines)

    async def kernels(self) -> dict[str, Any]:
        """The kernel decisions in force, and how often all engines called their kernels."""
        return json_report.with_calls(self._kernels, self._calls.counts)

    async def wait_dead(self) -> None:
        """Returns when the engine process has died."""
        await self._dead.wait()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        client: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields outputs of `sampling_params.output_kind`, merged for a slow consumer; the last one
        is finished. trace_headers: `traceparent` and `tracestate` of the span that the request is a
        part of. priority: lower is earlier, with --scheduling-policy priority. client: who asks;
        clients share the places equally. Raises RequestError or EngineDeadError."""
        refuse_lora(lora_request)
        await self._when_ready()
        self._check_open()
        self._check_priority(priority)
        given = await asyncio.to_thread(
            self._inputs.process, request_id, prompt, sampling_params, priority, client
        )
        self._check_open()  # again after the wait
        if request_id in self._in_flight:
            raise RequestError(f"request id {request_id!r} is in use", "request_id")
        state = self._outputs.add(request_id, given, sampling_params)
        in_flight = InFlightRequest(state, self._engines[0], given.requests)
        if self.tracer is not None:
            in_flight.trace = RequestTrace.of_current(trace_headers or {})
        self._in_flight[request_id] = in_flight
        self._dispatch(in_flight)
        try:
            while True:
                await in_flight.updated.wait()
                in_flight.updated.clear()
                if in_flight.state.has_unread_prompt:
                    await aside(in_flight.state.read_prompt)
                # No await from here to `take`: the state must not change in between.
                if in_flight.state.error is not None:
                    raise in_flight.state.error
                finished = in_flight.state.is_finished
                if not finished:
                    self._check_alive()
                    if in_flight.error is not None:
                        raise in_flight.error
                if (output := in_flight.state.take()) is not None:
                    yield output
                if finished:
                    return
        finally:
            self._leave(request_id, in_flight)

    def _dispatch(self, in_flight: InFlightRequest) -> None:
        # Ties go to the first engine, so an idle server uses one engine.
        engine = in_flight.engine = min(self._engines, key=lambda engine: engine.num_in_flight)
        engine.num_in_flight += in_flight.state.params.n
        self._num_sent += 1
        number = self._num_sent
        with suppress(EngineDeadError):  # noticed elsewhere; the next engine gets what is unsent
            engine.send(process.Add(in_flight.unsent, number))
            if engine.dp_rank.rendezvous is not None:  # all ranks step together
                for other in self._engines:
                    if other is not engine:
                        other.send(process.Wake(number))

    def _check_open(self) -> None:
        """Raises where new requests are refused."""
        self._check_alive()
        if self._restart is not None:
            raise RestartingError(self._restart_reason, self._processes.seconds_to_ready)

    def _check_alive(self) -> None:
        if self.is_dead:
            raise (StoppingError if self._is_stopping else EngineDeadError)(self.dead_reason)

    def _check_priority(self, priority: int) -> None:
        if priority and self.vllm_config.scheduler_config.policy != "priority":
            raise RequestError(
                f"priority {priority} needs a server started with --scheduling-policy priority",
                "priority",
            )

    def _leave(self, request_id: str, in_flight: InFlightRequest) -> None:
        self._in_flight.pop(request_id, None)
        in_flight.engine.num_in_flight -= in_flight.state.params.n
        running = self._outputs.remove(request_id)
        if running and not self.is_dead:
            with suppress(EngineDeadError):
                in_flight.engine.send(process.Abort(running))
        metrics = self.metrics.engines[in_flight.engine.dp_rank.rank]
        stats = request_stats(in_flight.state)
        metrics.record_finished(stats)
        if self.tracer is not None and in_flight.trace is not None:
            error = in_flight.state.error or in_flight.error
            if error is None and self.is_dead and not in_flight.state.is_finished:
                error = EngineDeadError(self.dead_reason)
            model = self.model_config.served_model_name[0]
            self.tracer.record(in_flight.trace.finished(in_flight.state, stats, model, error))

    async def _read_outputs(self, engine: EngineProcess) -> None:
        decoder = process.decoder()
        try:
            while True:
                message = decoder.decode(await engine.receiver.recv())
                if isinstance(message, process.Returned):
                    self._take_returned(engine, message)
                    continue
                if isinstance(message, process.Failed):
                    if message.is_of_peer:
                        await asyncio.sleep(CAUSE_SECONDS)
                    self._die(message.message, engine)
                    return
                assert isinstance(message, process.Outputs)
                self._take_outputs(engine, message)
                # recv does not yield while messages are queued.
                await asyncio.sleep(0)
        except Exception as error:
            logger.exception("cannot process the engine's outputs")
            self._die(f"outputs could not be processed ({error!r})")

    def _take_returned(self, engine: EngineProcess, message: process.Returned) -> None:
        waiting = self._calls_in_flight.pop((engine.dp_rank.rank, message.number), None)
        if waiting is None or waiting.done():
            return
        if message.error is None:
            waiting.set_result(message.value)
        else:
            waiting.set_exception(RequestError(message.error))

    def _take_outputs(self, engine: EngineProcess, message: process.Outputs) -> None:
        engine.stats = message.stats
        for name in (*message.started, *(output.request_id for output in message.outputs)):
            if (in_flight := self._in_flight.get(name.rpartition("#")[0])) is not None:
                in_flight.unsent = []
                if in_flight.trace is not None:
                    in_flight.trace.begin()
        self._calls.update(message.stats.calls)
        metrics = self.metrics.engines[engine.dp_rank.rank]
        metrics.record_step(message.stats)
        if message.stats.compile_waits and self.tracer is not None:
            for other in self._in_flight.values():
                if other.engine is engine and other.trace is not None:
                    other.trace.compile_waits += message.stats.compile_waits
        if not message.outputs:
            return
        changed, to_abort = self._outputs.process(message.outputs)
        if to_abort:
            with suppress(EngineDeadError):  # reported elsewhere, with the cause
                engine.send(process.Abort(to_abort))
        now = time.monotonic()
        for state, output in changed:
            assert isinstance(state, RequestState)
            record_output(metrics, state, output, now)
            self._in_flight[state.request_id].updated.set()

    def _record_requests(self) -> None:
        """Engines read no messages during a step: what they have not read yet is waiting."""
        for engine in self._engines:
            own = (f.state for f in self._in_flight.values() if f.engine is engine)
            num_sent = sum(state.num_running for state in own)
            num_running = min(engine.stats.num_running, num_sent)
            metrics = self.metrics.engines[engine.dp_rank.rank]
            metrics.record_requests(num_running, num_sent - num_running)
            metrics.record_sleep(self.is_asleep)
        self.metrics.record_silence(self._processes.silent_s)

    async def _watch_process(self, engine: EngineProcess) -> None:
        await engine.wait_end()
        # The exit code comes after the exit.
        await asyncio.to_thread(engine.process.join, STOP_SECONDS)
        code = engine.process.exitcode
        # A killed process sends nothing; one that exits by itself may, or may blame a peer.
        was_killed = code is not None and code < 0
        await asyncio.sleep(_LAST_MESSAGE_SECONDS if was_killed else 2 * CAUSE_SECONDS)
        if engine.why_killed:
            self._die(engine.why_killed)
        else:
            self._die(f"the engine process died ({ending(code)})", engine)

    def _die(self, reason: str, engine: EngineProcess | None = None) -> None:
        """Starts the engines again, or marks them as dead where no restart is left, and wakes all
        callers. The first reason is kept."""
        if self.is_dead or self._restart is not None:
            return
        reason = f"{self._processes.name_of(engine) if engine is not None else ''}{reason}"
        if self._processes.budget.take():
            self._restart = asyncio.create_task(self._start_again(reason))
        else:
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        limit = self._processes.budget.limit
        used = f" after {limit} restarts within an hour (--restarts)" if limit else ""
        reason = f"{reason}{used}; restart the server"
        logger.error("%s", reason)
        self._end(reason)

    async def _start_again(self, reason: str) -> None:
        """Requests of which no step has begun are kept for the new engines, once. All others end:
        one of them may be what the engine failed of."""
        reason = self._restart_reason = f"{reason}; the engine is being started again"
        logger.error("%s", reason)
        self.metrics.record_restart()
        for task in self._tasks:
            task.cancel()
        self.is_asleep = False
        for in_flight in self._in_flight.values():
            if not in_flight.unsent or in_flight.is_resent:
                in_flight.error = EngineDeadError(f"{reason}; send the request again")
                in_flight.updated.set()
        self._fail_calls(reason)
        try:
            await self._processes.start_again()
            ready = await self._processes.load()
        except Exception as error:
            self._give_up(str(error) or repr(error))
            return
        self._tasks = []
        self._serve(ready)
        self._restart = None
        for in_flight in list(self._in_flight.values()):
            if in_flight.error is None and not in_flight.state.is_finished:
                in_flight.is_resent = True
                self._dispatch(in_flight)

    def _end(self, reason: str) -> None:
        self.is_dead, self.dead_reason = True, reason
        for in_flight in self._in_flight.values():
            in_flight.updated.set()
        self._fail_calls(reason)
        self._dead.set()

    def _fail_calls(self, reason: str) -> None:
        for waiting in self._calls_in_flight.values():
            if not waiting.done():
                waiting.set_exception(EngineDeadError(reason))
        self._calls_in_flight.clear()

    def shutdown(self) -> "asyncio.Task[None]":
        """Ends the engine processes; requests in flight end with EngineDeadError. To be awaited in
        an event loop; without one it returns when they have ended."""
        try:
            return asyncio.get_running_loop().create_task(self._shut_down())
        except RuntimeError:
            with asyncio.Runner() as runner:
                task = runner.get_loop().create_task(self._shut_down())
                runner.get_loop().run_until_complete(task)
            return task

    async def _shut_down(self) -> None:
        # An engine reads no messages while it loads the model or waits for a dead peer.
        is_unreachable = self.is_dead or not self._tasks or self._restart is not None
        if not self.is_dead:
            self._is_stopping = True
            self._end("the server is shutting down")
        others = [task for task in (self._watching, self._restart) if task is not None]
        for task in (*self._tasks, *others):
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)  # none starts another engine now
        for engine in self._engines:
            try:
                if is_unreachable:
                    engine.process.kill()
                elif engine.process.is_alive():
                    engine.send(process.Stop())
            except EngineDeadError:  # it is exiting
                engine.process.kill()
        for engine in self._engines:
            await asyncio.to_thread(engine.process.join, STOP_SECONDS)
            engine.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)
