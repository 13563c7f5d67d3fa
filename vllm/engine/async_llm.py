"""The engine client that starts the engines, in processes of their own, and watches them."""

import asyncio
import dataclasses
from contextlib import suppress
from typing import Any

from vllm.engine import process
from vllm.engine.api_messages import ServerState
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.engine_client import EngineClient, EngineLink
from vllm.engine.engine_process import CAUSE_SECONDS, STOP_SECONDS, EngineProcess, close, kill
from vllm.engine.engines import Engines
from vllm.engine.input_processor import InputProcessor
from vllm.engine.metrics import SchedulerStats
from vllm.engine.supervision import Supervision
from vllm.engine.tokenizer import load_tokenizer
from vllm.errors import EngineDeadError, RequestError
from vllm.kernels.report import json_report
from vllm.kernels.report.calls import CallCounter
from vllm.logger import get_logger
from vllm.utils.processes import ending
from vllm.utils.startup import current_report

logger = get_logger(__name__)

# An engine's last message may arrive after its exit was noticed.
_LAST_MESSAGE_SECONDS = 0.2
# Engines that may start before the configuration is validated.
_MAX_EARLY = 16


class AsyncLLM(EngineClient):
    """`generate` yields a request's outputs; closing the generator aborts the request. The model
    loads in processes of its own, which a script must allow for with `if __name__ == "__main__":`;
    the first request waits for it. tracer: gets each request that ends; closed with the engines.
    num_of_others: by rank, sequences that other clients of the engines have in flight.
    silent_of_others: seconds since their last sign of life, by name."""

    def __init__(
        self, args: EngineArgs, supervision: Supervision | None = None, has_tokenizer: bool = True
    ):
        """has_tokenizer: False where others make the requests."""
        if args.data_parallel_size > _MAX_EARLY:
            args.create_engine_config()  # raises for mistakes before that many processes start
        self._processes = Engines(args, supervision or Supervision())
        try:
            report = current_report()
            with report.phase("configuration"):
                config = args.create_engine_config()
            model = config.model_config
            with report.phase("tokenizer"):
                needs_none = model.skip_tokenizer_init or not has_tokenizer
                tokenizer = None if needs_none else load_tokenizer(model)
        except BaseException:
            kill(self._engines)
            close(self._engines)
            raise
        super().__init__(config, tokenizer, len(self._engines))
        self.metrics.on_render = self._record_requests
        self.num_of_others = [0] * len(self._engines)
        self.silent_of_others: dict[str, float] = {}
        self._is_ready = False
        self._restart: asyncio.Task[None] | None = None
        self._restart_reason = ""
        self._kernels: dict[str, Any] = {}
        self._calls = CallCounter()
        self._calls_in_flight: dict[tuple[int, int], asyncio.Future[Any]] = {}
        self._num_calls = 0
        self._loading = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **neutral: Any) -> "AsyncLLM":
        """Starts to load the model. neutral: usage_context and others of upstream's; no effect."""
        return cls(engine_args)

    @property
    def _engines(self) -> list[EngineProcess]:
        return self._processes.all

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
        self._inputs = InputProcessor(self.vllm_config, self.tokenizer)
        self._kernels = ready[0].kernels
        self.metrics.record_cache_config(self.vllm_config.cache_config, ready[0].num_blocks)
        for engine, message in zip(self._engines, ready):
            self.metrics.record_startup(f"engine {engine.rank}", message.startup)
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
            waiting = self._calls_in_flight[(engine.rank, number)] = loop.create_future()
            waits.append(waiting)
            engine.send(process.Call(number, method, [*arguments]))
        return await asyncio.gather(*waits)

    @property
    def state(self) -> ServerState:
        """What other clients of the same engines are told."""
        restarting = self._restarting or ("", 0)
        is_serving = self._is_ready and self._restart is None and not self.is_dead
        return ServerState(
            addresses=[engine.client_address for engine in self._engines] if is_serving else [],
            is_lockstep=self._engines[0].is_lockstep,
            max_model_len=self.model_config.max_model_len,
            trouble="" if self.is_dead or restarting[0] else self.trouble,
            restart_reason=restarting[0],
            seconds_to_ready=restarting[1],
            dead_reason=self.dead_reason,
            is_asleep=self.is_asleep,
        )

    def forget_client(self, name: str) -> None:
        """Another client is gone: what it asked for is aborted."""
        for engine in self._engines:
            with suppress(EngineDeadError):
                engine.send(process.Leave(name))

    @property
    def _restarting(self) -> tuple[str, int] | None:
        if self._restart is None:
            return None
        return self._restart_reason, self._processes.seconds_to_ready

    @property
    def trouble(self) -> str:
        if self.is_dead:
            return self.dead_reason
        if self._restart is not None:
            return self._restart_reason
        return "; ".join(self._processes.troubles.values())

    async def kernels(self) -> dict[str, Any]:
        return json_report.with_calls(self._kernels, self._calls.counts)

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
        waiting = self._calls_in_flight.pop((engine.rank, message.number), None)
        if waiting is None or waiting.done():
            return
        if message.error is None:
            waiting.set_result(message.value)
        else:
            waiting.set_exception(RequestError(message.error))

    def _take_stats(self, engine: EngineLink, stats: SchedulerStats) -> None:
        super()._take_stats(engine, stats)
        self._engines[engine.rank].stats = stats
        self._calls.update(stats.calls)
        self.metrics.engines[engine.rank].record_step(stats)

    def _record_requests(self) -> None:
        """Engines read no messages during a step: what they have not read yet is waiting."""
        for engine, num_of_others in zip(self._engines, self.num_of_others):
            num_sent = self.num_unfinished(engine.rank) + num_of_others
            num_running = min(engine.stats.num_running, num_sent)
            metrics = self.metrics.engines[engine.rank]
            metrics.record_requests(num_running, num_sent - num_running)
            metrics.record_sleep(self.is_asleep)
        self.metrics.record_silence(self._processes.silent_s | self.silent_of_others)

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
        reason = self._restart_reason = f"{reason}; the engine is being started again"
        logger.error("%s", reason)
        self.metrics.record_restart()
        for task in self._tasks:
            task.cancel()
        self.is_asleep = False
        self._interrupt(reason)
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
        self._resume()

    def _end(self, reason: str) -> None:
        super()._end(reason)
        self._fail_calls(reason)

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
