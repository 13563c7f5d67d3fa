"""The engine client of a server: requests as async generators, whoever started the engines."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from vllm.config import VllmConfig
from vllm.core.request import EngineRequest
from vllm.engine import process
from vllm.engine.engine_calls import EngineCalls
from vllm.engine.input_processor import InputProcessor, Prompt, is_quick, refuse_lora
from vllm.engine.metrics import Metrics, SchedulerStats
from vllm.engine.output_processor import OutputProcessor, RequestState
from vllm.engine.request_metrics import record_output, request_stats
from vllm.engine.request_traces import RequestTrace, RequestTracer
from vllm.errors import EngineDeadError, RequestError, RestartingError, StoppingError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.utils.aside import aside


class EngineLink(Protocol):
    """A way to an engine process. rank: among the data-parallel ones. num_in_flight: sequences sent
    on it. is_lockstep: whether all engines step together."""

    num_in_flight: int

    @property
    def rank(self) -> int: ...

    @property
    def is_lockstep(self) -> bool: ...

    def send(self, message: process.ToEngine) -> None:
        """Does not block. EngineDeadError where nobody receives."""


@dataclass(slots=True)
class InFlightRequest:
    """A request whose caller waits. unsent: what the engine gets of it, while none of its steps has
    begun: another engine may take it. is_resent: to a second engine. error: why it ends early.
    trace: None where none is sent. updated: set when its state changes. is_idle: whether its caller
    has all of the outputs before and waits for the next. tell: see `generate`."""

    state: RequestState
    engine: EngineLink
    unsent: list[EngineRequest]
    is_resent: bool = False
    error: EngineDeadError | None = None
    trace: RequestTrace | None = None
    updated: asyncio.Event = field(default_factory=asyncio.Event)
    is_idle: bool = False
    tell: Callable[[RequestState], bool] | None = None

    def wake(self) -> None:
        """There is something new to tell. What `tell` raises ends this request alone."""
        try:
            is_told = self.is_idle and self.tell is not None and self.tell(self.state)
        except Exception as error:
            self.state.error, is_told = error, False
        if not is_told:
            self.updated.set()

    def begin(self) -> None:
        """Its first step is about to be computed, or was."""
        self.unsent = []
        if self.trace is not None:
            self.trace.begin()


class EngineClient(EngineCalls):
    """`generate` yields a request's outputs; closing the generator aborts the request. tracer: gets
    each request that ends. Ids of requests are unique among all clients of an engine."""

    tracer: RequestTracer | None = None

    def __init__(self, vllm_config: VllmConfig, tokenizer: Any, num_engines: int):
        super().__init__()
        self.vllm_config = vllm_config
        self.tokenizer = tokenizer
        model = vllm_config.model_config
        self.metrics = Metrics(model.served_model_name[0], model.max_model_len, num_engines)
        self._is_stopping = False
        self._outputs = OutputProcessor(tokenizer, vllm_config.scheduler_config.stream_interval)
        self._inputs = InputProcessor(vllm_config, tokenizer)
        self._in_flight: dict[str, InFlightRequest] = {}
        self._num_sent = 0
        self._dead = asyncio.Event()

    @property
    def _engines(self) -> Sequence[EngineLink]:
        raise NotImplementedError

    @property
    def trouble(self) -> str:
        """Why no requests are answered at the moment, as far as engines are the reason: which
        process is stopped or stuck, since when and doing what. "" where they are."""
        raise NotImplementedError

    @property
    def _restarting(self) -> tuple[str, int] | None:
        """While engines are started again: why, and for about how many seconds more."""
        raise NotImplementedError

    async def _when_ready(self) -> None:
        """Returns when the model is loaded; raises the error that prevented it."""
        raise NotImplementedError

    async def wait_ready(self) -> None:
        await self._when_ready()

    async def kernels(self) -> dict[str, Any]:
        """The kernel decisions in force, and how often all engines called their kernels."""
        raise NotImplementedError

    async def server_load(self, own: int) -> int:
        """Requests that the whole server is answering. own: those of this process."""
        return own

    async def render_metrics(self) -> bytes:
        """Of the whole server, to be sent as `vllm.engine.metrics.CONTENT_TYPE`."""
        return self.metrics.render()

    def shutdown(self) -> "asyncio.Task[None]":
        """Requests in flight end with EngineDeadError."""
        raise NotImplementedError

    async def is_tracing_enabled(self) -> bool:
        return self.tracer is not None

    @property
    def model_config(self) -> Any:
        return self.vllm_config.model_config

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
    def errored(self) -> bool:
        return self.is_dead and not self._is_stopping

    @property
    def dead_error(self) -> EngineDeadError:
        return EngineDeadError(self.dead_reason)

    @property
    def max_num_seqs(self) -> int:
        """Sequences that all engines run at once."""
        return int(self.vllm_config.scheduler_config.max_num_seqs) * len(self._engines)

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
        tell: Callable[[RequestState], bool] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields outputs of `sampling_params.output_kind`, merged for a slow consumer; the last one
        is finished. trace_headers: `traceparent` and `tracestate` of the span that the request is a
        part of. priority: lower is earlier, with --scheduling-policy priority. client: who asks;
        clients share the places equally. tell: takes what is new while the caller waits for it, in
        the moment when it arrives; where it returns False, having taken nothing, the generator
        yields it. Raises RequestError, EngineDeadError, or what `tell` raised."""
        refuse_lora(lora_request)
        await self._when_ready()
        self._check_open()
        self._check_priority(priority)
        read = partial(self._inputs.process, request_id, prompt, sampling_params, priority, client)
        if is_quick(prompt, sampling_params):
            given = read()
        else:
            given = await asyncio.to_thread(read)
            self._check_open()  # again after the wait
        if request_id in self._in_flight:
            raise RequestError(f"request id {request_id!r} is in use", "request_id")
        state = self._outputs.add(request_id, given, sampling_params)
        in_flight = InFlightRequest(state, self._engines[0], given.requests, tell=tell)
        if self.tracer is not None:
            in_flight.trace = RequestTrace.of_current(trace_headers or {})
        self._in_flight[request_id] = in_flight
        self._dispatch(in_flight)
        try:
            while True:
                in_flight.is_idle = True
                await in_flight.updated.wait()
                in_flight.is_idle = False
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
            if engine.is_lockstep:
                for other in self._engines:
                    if other is not engine:
                        other.send(process.Wake(number))

    def _check_open(self) -> None:
        """Raises where new requests are refused."""
        self._check_alive()
        if self._restarting is not None:
            raise RestartingError(*self._restarting)

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
        metrics = self.metrics.engines[in_flight.engine.rank]
        stats = request_stats(in_flight.state)
        metrics.record_finished(stats)
        if self.tracer is not None and in_flight.trace is not None:
            error = in_flight.state.error or in_flight.error
            if error is None and self.is_dead and not in_flight.state.is_finished:
                error = EngineDeadError(self.dead_reason)
            model = self.model_config.served_model_name[0]
            self.tracer.record(in_flight.trace.finished(in_flight.state, stats, model, error))

    def _take_outputs(self, engine: EngineLink, message: process.Outputs) -> None:
        for name in message.started:
            if (in_flight := self._in_flight.get(name.rpartition("#")[0])) is not None:
                in_flight.begin()
        self._take_stats(engine, message.stats)
        if not message.outputs:
            return
        changed, to_abort = self._outputs.process(message.outputs)
        if to_abort:
            with suppress(EngineDeadError):  # reported elsewhere, with the cause
                engine.send(process.Abort(to_abort))
        metrics, now = self.metrics.engines[engine.rank], time.monotonic()
        for state, output in changed:
            assert isinstance(state, RequestState)
            record_output(metrics, state, output, now)
            in_flight = self._in_flight[state.request_id]
            if in_flight.unsent:
                in_flight.begin()
            if state.is_due:
                in_flight.wake()
        metrics.record_generated(sum(len(output.token_ids) for _, output in changed))

    def num_unfinished(self, rank: int) -> int:
        """Sequences sent to an engine that it has not finished."""
        own = (f.state for f in self._in_flight.values() if f.engine.rank == rank)
        return sum(state.num_running for state in own)

    def _interrupt(self, reason: str) -> None:
        """The engines are gone and will be started again. Requests of which no step has begun are
        kept for the new ones, once. All others end: one may be what the engine failed of."""
        for in_flight in self._in_flight.values():
            if not in_flight.unsent or in_flight.is_resent:
                in_flight.error = EngineDeadError(f"{reason}; send the request again")
                in_flight.updated.set()

    def _resume(self) -> None:
        """The engines are there again."""
        for in_flight in list(self._in_flight.values()):
            if in_flight.error is None and not in_flight.state.is_finished:
                in_flight.is_resent = True
                self._dispatch(in_flight)

    def _end(self, reason: str) -> None:
        self.is_dead, self.dead_reason = True, reason
        for in_flight in self._in_flight.values():
            in_flight.updated.set()
        self._dead.set()

    def _take_stats(self, engine: EngineLink, stats: SchedulerStats) -> None:
        if stats.compile_waits and self.tracer is not None:
            for other in self._in_flight.values():
                if other.engine is engine and other.trace is not None:
                    other.trace.compile_waits += stats.compile_waits
