"""The engine client of a server: engines in their own processes, requests as async generators."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.core.request import EngineRequest
from vllm.engine import process
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.engine_calls import EngineCalls
from vllm.engine.engine_process import (
    CAUSE_SECONDS,
    STOP_SECONDS,
    EngineProcess,
    close,
    kill,
    start_engines,
)
from vllm.engine.input_processor import InputProcessor, Prompt, refuse_lora
from vllm.engine.metrics import Metrics
from vllm.engine.output_processor import OutputProcessor, RequestState
from vllm.engine.request_metrics import record_output, request_stats
from vllm.engine.tokenizer import load_tokenizer
from vllm.errors import (
    EngineDeadError,
    KernelFailedError,
    RequestError,
    StoppingError,
    VllmError,
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
# Restarts after kernel failures. A fault makes the GPU unusable and hides the next one: a backend
# that always faults does so once for each problem size.
_MAX_RESTARTS = 12
# Consecutive silent checks after which an engine with requests counts as hung.
_MAX_SILENT_CHECKS = 10
# Engines that may start before the configuration is validated.
_MAX_EARLY = 16


@dataclass(slots=True)
class InFlightRequest:
    """A request whose caller waits. updated: set when its state changes."""

    state: RequestState
    engine: EngineProcess
    updated: asyncio.Event = field(default_factory=asyncio.Event)


class AsyncLLM(EngineCalls):
    """`generate` yields a request's outputs; closing the generator aborts the request. The model
    loads in processes of its own, which a script must allow for with `if __name__ == "__main__":`;
    the first request waits for it."""

    def __init__(self, args: EngineArgs):
        if args.data_parallel_size > _MAX_EARLY:
            args.create_engine_config()  # raises for mistakes before that many processes start
        self._args = args
        self._engines = start_engines(args)
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
        self.is_dead = False
        self.dead_reason = ""
        self._is_stopping = False
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

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **neutral: Any) -> "AsyncLLM":
        """Starts to load the model. neutral: usage_context and others of upstream's; no effect."""
        return cls(engine_args)

    @property
    def model_config(self) -> Any:
        return self.vllm_config.model_config

    async def wait_ready(self) -> None:
        """Returns when the model is loaded; raises the error that prevented it."""
        report = current_report()
        report.count_rest("imports")
        with report.phase("waiting for the engine"):
            ready = await self._all_ready()
        max_model_len = min(message.max_model_len for message in ready)
        model = dataclasses.replace(self.model_config, max_model_len=max_model_len)
        self.vllm_config = dataclasses.replace(self.vllm_config, model_config=model)
        self._inputs = InputProcessor(model, self.tokenizer)
        self._kernels = ready[0].kernels
        self.metrics.record_cache_config(self.vllm_config.cache_config, ready[0].num_blocks)
        for engine in self._engines:
            self._tasks += [
                asyncio.create_task(self._read_outputs(engine)),
                asyncio.create_task(self._watch_process(engine)),
            ]
        if ready[0].most_silent_s is not None:
            watch = self._watch_silence(ready[0].most_silent_s)
            self._tasks.append(asyncio.create_task(watch))

    async def _when_ready(self) -> None:
        """As `wait_ready`, by whoever needs the engine first."""
        if not self._tasks and not self.is_dead:
            async with self._loading:
                if not self._tasks and not self.is_dead:
                    await self.wait_ready()

    async def _all_ready(self) -> list[process.Ready]:
        """Restarts the engines after a kernel failure: the failed kernel is in quarantine then."""
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
            await asyncio.to_thread(kill, self._engines)
            close(self._engines)
            self._engines = start_engines(self._args)
        raise AssertionError("the last try returns or raises")

    async def _wait_ready(self, engine: EngineProcess) -> process.Ready:
        try:
            return await engine.wait_ready()
        except VllmError as error:
            raise type(error)(f"{self._name_of(engine)}{error}") from None

    async def call_engines(self, method: str, *arguments: Any) -> list[Any]:
        """What `method` of every engine core returns, one of `process.UTILITIES`; RequestError for
        what it refuses."""
        await self._when_ready()
        self._check_alive()
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

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self) -> None:
        """Nothing is logged: statistics are in `metrics`."""

    async def check_health(self) -> None:
        """Raises EngineDeadError where the engine has died."""
        self._check_alive()

    @property
    def is_running(self) -> bool:
        return not self.is_dead

    @property
    def is_stopped(self) -> bool:
        return self.is_dead

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
        priority: int = 0,
        client: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields outputs of `sampling_params.output_kind`, merged for a slow consumer; the last one
        is finished. priority: lower is earlier, with --scheduling-policy priority. client: who
        asks; clients share the places equally. Raises RequestError or EngineDeadError."""
        refuse_lora(lora_request)
        await self._when_ready()
        self._check_alive()
        self._check_priority(priority)
        given = await asyncio.to_thread(
            self._inputs.process, request_id, prompt, sampling_params, priority, client
        )
        self._check_alive()  # again after the wait
        if request_id in self._in_flight:
            raise RequestError(f"request id {request_id!r} is in use", "request_id")
        # Ties go to the first engine, so an idle server uses one engine.
        engine = min(self._engines, key=lambda engine: engine.num_in_flight)
        state = self._outputs.add(request_id, given, sampling_params)
        in_flight = self._in_flight[request_id] = InFlightRequest(state, engine)
        engine.num_in_flight += sampling_params.n
        try:
            self._dispatch(engine, given.requests)
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
                if (output := in_flight.state.take()) is not None:
                    yield output
                if finished:
                    return
        finally:
            self._leave(request_id, in_flight)

    def _dispatch(self, engine: EngineProcess, requests: list[EngineRequest]) -> None:
        self._num_sent += 1
        number = self._num_sent
        engine.send(process.Add(requests, number))
        if engine.dp_rank.rendezvous is not None:  # all ranks step together
            for other in self._engines:
                if other is not engine:
                    other.send(process.Wake(number))

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
        metrics.record_finished(request_stats(in_flight.state))

    async def _read_outputs(self, engine: EngineProcess) -> None:
        decoder = process.decoder()
        try:
            while True:
                message = decoder.decode(await engine.receiver.recv())
                engine.num_silent = 0
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
        self._calls.update(message.stats.calls)
        metrics = self.metrics.engines[engine.dp_rank.rank]
        metrics.record_step(message.stats)
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

    async def _watch_process(self, engine: EngineProcess) -> None:
        await engine.wait_end()
        # The exit code comes after the exit.
        await asyncio.to_thread(engine.process.join, STOP_SECONDS)
        code = engine.process.exitcode
        # A killed process sends nothing; one that exits by itself may, or may blame a peer.
        was_killed = code is not None and code < 0
        await asyncio.sleep(_LAST_MESSAGE_SECONDS if was_killed else 2 * CAUSE_SECONDS)
        self._die(f"the engine process died ({ending(code)})", engine)

    async def _watch_silence(self, most_s: float) -> None:
        """Detects a hanging GPU, which ends no process. Counts checks instead of seconds: all
        processes of a node may be suspended and resumed."""
        reason = (
            f"the engine gave no sign of life for {most_s:g} s while it had requests (twice "
            f"--distributed-timeout-seconds): its GPU may hang"
        )
        while True:
            await asyncio.sleep(most_s / _MAX_SILENT_CHECKS)
            busy = {id(f.engine) for f in self._in_flight.values() if not f.state.is_finished}
            for engine in self._engines:
                engine.num_silent = engine.num_silent + 1 if id(engine) in busy else 0
                if engine.num_silent > _MAX_SILENT_CHECKS:
                    self._die(reason, engine)

    def _name_of(self, engine: EngineProcess) -> str:
        return f"data-parallel engine {engine.dp_rank.rank}: " if len(self._engines) > 1 else ""

    def _die(self, reason: str, engine: EngineProcess | None = None) -> None:
        """Marks the engine as dead and wakes all callers. The first reason is kept."""
        if not self.is_dead:
            name = self._name_of(engine) if engine is not None else ""
            reason = f"{name}{reason}; restart the server"
            logger.error("%s", reason)
            self._end(reason)

    def _end(self, reason: str) -> None:
        self.is_dead, self.dead_reason = True, reason
        for in_flight in self._in_flight.values():
            in_flight.updated.set()
        for waiting in self._calls_in_flight.values():
            if not waiting.done():
                waiting.set_exception(EngineDeadError(reason))
        self._dead.set()

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
        is_unreachable = self.is_dead or not self._tasks
        if not self.is_dead:
            self._is_stopping = True
            self._end("the server is shutting down")
        for task in self._tasks:
            task.cancel()
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
