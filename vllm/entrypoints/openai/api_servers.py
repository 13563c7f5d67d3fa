"""Several processes that answer HTTP on one socket, started and watched by this one.

This process has the engines, and what all API processes share: places for requests, stored
responses, the state of the engines, the sum of the metrics.
"""

import asyncio
import contextlib
import inspect
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from vllm.engine.admission import Admission
from vllm.engine.api_messages import (
    Answer,
    FromClient,
    Hello,
    Poll,
    Report,
    ServerState,
    Serving,
    ToClient,
)
from vllm.engine.async_llm import AsyncLLM
from vllm.engine.engine_process import interrupts_ignored
from vllm.engine.metrics_sum import Family, families_of, rendered, summed
from vllm.engine.process import Call, Failed
from vllm.engine.supervision import TICK_SECONDS, RestartBudget, Watch, Watched
from vllm.entrypoints.openai.api_process import run_api_process
from vllm.entrypoints.openai.settings import ServerSettings
from vllm.entrypoints.openai.shared_responses import StoreOfAll
from vllm.entrypoints.openai.stop import Stop, first_of
from vllm.errors import EngineDeadError, VllmError
from vllm.logger import get_logger
from vllm.utils import systemd
from vllm.utils.heartbeat import Page
from vllm.utils.interrupts import ending_with
from vllm.utils.processes import ending

logger = get_logger(__name__)

# How often the state of the engines is looked at; changes are told.
_LOOK_SECONDS = 0.05
_REPORT_TIMEOUT_S = 1.0
# Of an API process that dies, what it counted since its last report is lost.
_REPORT_SECONDS = 5.0
# Beyond what running requests get: for the last bytes, and for the end of a process.
_END_SECONDS = 5.0
_ENGINE_CALLS = ("reset_prefix_cache", "sleep", "wake_up", "start_profile", "stop_profile")


@dataclass(eq=False)
class _ApiProcess:
    """name: unique among all that have been. place: among those that are. watch: its heartbeats.
    is_known: it asked for the state. places: of its requests, by its own numbers."""

    name: str
    place: int
    process: Any
    watch: Watch
    is_known: bool = False
    is_serving: bool = False
    is_silent: bool = False
    why_killed: str = ""
    failure: Failed | None = None
    report: Report = field(default_factory=lambda: Report(0, [], [], 0))
    places: dict[int, contextlib.ExitStack] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"API process {self.place} (pid {self.process.pid})"


class ApiServers:
    """Until SIGTERM or SIGINT, as `vllm.entrypoints.openai.server.Server`."""

    def __init__(self, engine: AsyncLLM, settings: ServerSettings, listener: socket.socket):
        self._engine = engine
        self._settings = settings
        self._listener = listener
        self._stop = Stop()
        self._budget = RestartBudget(settings.restarts)
        self._admission = Admission(engine.max_num_seqs, settings.max_waiting or None)
        self._store = StoreOfAll()
        self._processes: list[_ApiProcess] = []
        self._num_started = 0
        self._created = int(time.time())
        self._past: list[Family] = []  # counts of processes that are gone
        self._state: ServerState | None = None
        self._reports: dict[tuple[str, int], asyncio.Future[None]] = {}
        self._num_polls = 0
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._all_serving = asyncio.Event()
        self._all_ended = asyncio.Event()
        self._answering: set[asyncio.Task[None]] = set()
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-")
        self._address = f"ipc://{Path(self._folder.name, 'control')}"
        self._context = zmq.asyncio.Context()
        self._wire = self._context.socket(zmq.ROUTER)
        self._wire.set_hwm(0)
        self._wire.bind(self._address)
        self._encoder = msgspec.msgpack.Encoder()

    async def run(self, on_ready: Callable[[str], None]) -> None:
        """Raises if the model cannot be loaded, or if the engine or too many API processes die, and
        SystemExit for a signal before it is loaded."""
        tasks = [asyncio.create_task(work) for work in (
            self._listen(), self._tell_changes(), self._watch(), self._keep_reports(),
        )]  # fmt: skip
        if (seconds := systemd.watchdog_seconds()) is not None:
            tasks.append(asyncio.create_task(systemd.feed_watchdog(seconds)))
        try:
            for place in range(self._settings.api_server_count):
                self._start(place)
            with self._stop.on_signals():
                await first_of(self._wait_serving(), self._stop.soon.wait(), self._failed, *tasks)
                if self._stop.count:
                    raise ending_with(self._stop.number)  # nothing was promised to anybody
                systemd.notify("READY=1")
                on_ready(self._engine.model_config.served_model_name[0])
                ends = self._engine.wait_dead(), self._stop.soon.wait()
                try:
                    await first_of(*ends, self._failed, *tasks)
                except VllmError:  # the other processes finish what they answer
                    self._stop.raise_to(1)
                    await self._drain()
                    raise
                await self._drain()
        finally:
            for task in (*tasks, *self._answering):
                task.cancel()
            await self._close()
        if not self._stop.count:
            raise EngineDeadError(self._engine.dead_reason)

    async def _wait_serving(self) -> None:
        await self._engine.wait_ready()
        await self._all_serving.wait()

    async def _drain(self) -> None:
        """The processes hear of the stop, or of the dead engine, as of any change."""
        systemd.notify("STOPPING=1")
        seconds = 0.0 if self._engine.is_dead else self._settings.shutdown_timeout
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds + _END_SECONDS):
                await self._all_ended.wait()

    async def _close(self) -> None:
        for api in self._processes:
            asyncio.get_running_loop().remove_reader(api.process.sentinel)
            api.process.kill()
        for api in self._processes:
            await asyncio.to_thread(api.process.join, _END_SECONDS)
        self._context.destroy(linger=0)
        self._folder.cleanup()

    # ------------------------------------------------------------ processes

    def _start(self, place: int) -> None:
        self._num_started += 1
        name, page = f"api{self._num_started}.", Page(1)
        process = multiprocessing.get_context("spawn").Process(
            target=run_api_process,
            args=(self._engine.vllm_config, self._settings, self._listener, self._address, name,
                  place, self._created, page),
            name="vllm-api",
        )  # fmt: skip
        with interrupts_ignored():
            process.start()
        watch = Watch([Watched(f"API process {place}", page, 0)])
        api = _ApiProcess(name, place, process, watch)
        self._processes.append(api)
        asyncio.get_running_loop().add_reader(process.sentinel, self._ended, api)

    def _ended(self, api: _ApiProcess) -> None:
        """Starts another in its place, where that is due and allowed."""
        asyncio.get_running_loop().remove_reader(api.process.sentinel)
        api.process.join(_END_SECONDS)  # the exit code comes after the exit
        self._processes.remove(api)
        self._engine.forget_client(api.name)
        for place in api.places.values():
            place.close()
        counts = [family for family in api.report.families if family.is_count]
        self._past = summed([self._past, counts])
        for page in (process.page for process in api.watch.processes):
            page.close()
        if not self._processes:
            self._all_ended.set()
        if self._stop.count or self._engine.is_dead or self._failed.done():
            return
        reason = api.why_killed or f"{api.title} died ({ending(api.process.exitcode)})"
        if api.failure is not None:
            self._failed.set_exception(VllmError(api.failure.message))
        elif self._budget.take():
            logger.error("%s; it is being started again, its requests are lost", reason)
            try:
                self._start(api.place)
            except OSError as error:
                text = f"{api.title} cannot be started again ({error}); restart the server"
                self._failed.set_exception(EngineDeadError(text))
        else:
            limit = self._budget.limit
            used = f" after {limit} restarts within an hour (--restarts)" if limit else ""
            self._failed.set_exception(EngineDeadError(f"{reason}{used}; restart the server"))

    async def _watch(self) -> None:
        """Kills processes that are stopped for long; their end is noticed as any other."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            for api in self._processes:
                api.watch.tick(now - before)
                troubles = "; ".join(api.watch.troubles().values())
                if troubles and not api.is_silent:
                    logger.error("%s", troubles)
                elif api.is_silent and not troubles:
                    logger.info("%s is back", api.title)
                api.is_silent = bool(troubles)
                dead_after = self._settings.dead_after
                if troubles and api.watch.is_dead(dead_after) and not api.why_killed:
                    api.why_killed = f"{troubles}; killed after {dead_after:g} s (--dead-after)"
                    api.process.kill()
            before = now

    # ------------------------------------------------------------ messages

    def _send(self, api: _ApiProcess, message: ToClient) -> None:
        self._wire.send_multipart((api.name.encode(), self._encoder.encode(message)))

    def _told_state(self) -> ServerState:
        return msgspec.structs.replace(self._engine.state, num_stops=self._stop.count)

    def _tell_state(self) -> None:
        """Where it has changed."""
        if (state := self._told_state()) != self._state:
            self._state = state
            for api in self._processes:
                if api.is_known:
                    self._send(api, state)

    async def _tell_changes(self) -> None:
        while True:
            self._tell_state()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromClient)
        while True:
            sender, data = await self._wire.recv_multipart()
            name = sender.decode()
            api = next((api for api in self._processes if api.name == name), None)
            if api is not None:  # one that has ended may have left messages
                self._take(api, decoder.decode(data))
            await asyncio.sleep(0)  # recv does not yield while messages are queued

    def _take(self, api: _ApiProcess, message: FromClient) -> None:
        match message:
            case Hello():
                api.is_known = True
                self._send(api, self._told_state())
            case Serving():
                api.is_serving = True
                if all(other.is_serving for other in self._processes):
                    self._all_serving.set()
            case Failed():
                api.failure = message
            case Report():
                api.report = message
                waiting = self._reports.get((api.name, message.number))
                if waiting is not None and not waiting.done():
                    waiting.set_result(None)
            case Call():
                self._call(api, message)

    def _call(self, api: _ApiProcess, call: Call) -> None:
        """What takes no time is done at once, in the order of the messages."""
        method = self._method(api, call.method)
        try:
            value = method(*call.arguments)
        except Exception as error:
            self._send(api, _error_answer(call.number, error))
            return
        if not inspect.isawaitable(value):
            self._send(api, Answer(call.number, value))
            return
        changes = call.method in _ENGINE_CALLS
        task = asyncio.ensure_future(self._answer(api, call.number, value, changes))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def _method(self, api: _ApiProcess, name: str) -> Callable[..., Any]:
        match name:
            case "admit":
                return lambda *given: self._admit(api, *given)
            case "release":
                return lambda key: self._release(api, key)
            case "add_response" | "get_response" | "response_items" | "delete_response":
                return getattr(self._store, name)  # type: ignore[no-any-return]
            case "render_metrics" | "server_load":
                return getattr(self, f"_{name}")  # type: ignore[no-any-return]
        assert name == "kernels" or name in _ENGINE_CALLS, name
        return getattr(self._engine, name)  # type: ignore[no-any-return]

    async def _answer(self, api: _ApiProcess, number: int, value: Any, changes: bool) -> None:
        """changes: what all processes must know of before the call returns."""
        try:
            answer = Answer(number, await value)
        except Exception as error:
            answer = _error_answer(number, error)
        if changes:
            self._tell_state()
            await self._ask_reports()  # who answers has read what was sent before
        self._send(api, answer)

    def _admit(self, api: _ApiProcess, key: int, client: str, num_sequences: int) -> None:
        place = contextlib.ExitStack()
        place.enter_context(self._admission.reserve(client, num_sequences))
        api.places[key] = place

    def _release(self, api: _ApiProcess, key: int) -> None:
        """Of one that was refused there is none."""
        if (place := api.places.pop(key, None)) is not None:
            place.close()

    # ------------------------------------------------------------ reports

    async def _ask_reports(self) -> None:
        """Renews the reports of all that answer in time."""
        self._num_polls += 1
        number = self._num_polls
        asked = [(api.name, number) for api in self._processes if api.is_known]
        for key in asked:
            self._reports[key] = asyncio.get_running_loop().create_future()
        try:
            for api in self._processes:
                if api.is_known:
                    self._send(api, Poll(number))
            if asked:
                waits = [self._reports[key] for key in asked]
                await asyncio.wait(waits, timeout=_REPORT_TIMEOUT_S)
        finally:
            for key in asked:
                del self._reports[key]

    async def _keep_reports(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_SECONDS)
            await self._ask_reports()

    async def _server_load(self) -> int:
        await self._ask_reports()
        return sum(api.report.num_active for api in self._processes)

    async def _render_metrics(self) -> bytes:
        await self._ask_reports()
        engine, reports = self._engine, [api.report for api in self._processes]
        engine.num_of_others = [
            sum(report.num_unfinished[rank] for report in reports if report.number)
            for rank in range(len(engine.num_of_others))
        ]
        silent = (api.watch.silent_s for api in self._processes)
        engine.silent_of_others = {name: s for one in silent for name, s in one.items()}
        engine.metrics.on_render()
        own = families_of(engine.metrics.registry)
        return rendered(summed([own, self._past, *(report.families for report in reports)]))


def _error_answer(number: int, error: Exception) -> Answer:
    """One that is no user's mistake is logged, and its caller told: nobody waits for ever."""
    if not isinstance(error, VllmError):
        logger.error("an API process asked for what failed", exc_info=error)
        error = VllmError(f"{type(error).__name__}: {error}")
    return Answer.of_error(number, error)
