"""The server's life cycle: loading, serving, draining, closed."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from vllm import envs
from vllm.engine.admission import Admission
from vllm.engine.engine_client import EngineClient
from vllm.entrypoints.openai.answer_format import AnswerFormats
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.openai.generation import Service
from vllm.entrypoints.openai.http import Gate
from vllm.entrypoints.openai.http_protocol import http_protocol
from vllm.entrypoints.openai.http_setup import BACKLOG
from vllm.entrypoints.openai.prompts import Prompts
from vllm.entrypoints.openai.settings import ServerSettings
from vllm.entrypoints.openai.stop import Stop, first_of
from vllm.errors import EngineDeadError
from vllm.logger import get_logger
from vllm.reasoning.registry import reasoning_format
from vllm.sampling_params import generation_defaults
from vllm.tool_parsers.registry import tool_parser
from vllm.utils import systemd
from vllm.utils.interrupts import ending_with

logger = get_logger(__name__)

# How much longer a connection without a request in progress may last: one that sends no complete
# header, or does not read its response.
_BEYOND_KEEP_ALIVE_S = 15.0
_SWEEP_S = 5.0
# Time for the last bytes of responses after the end of all requests.
_CLOSE_S = 2.0
# Time for requests that wait on a dead engine to receive their error.
_DEAD_ENGINE_S = 1.0


class Server:
    """Answers HTTP for one engine, from before the model is loaded to the last request."""

    def __init__(
        self,
        engine: EngineClient,
        settings: ServerSettings,
        stop: Stop | None = None,
        service: Service | None = None,
    ):
        """stop: None for signals to this process. service: None for one that no other process has
        a part in."""
        self._engine = engine
        self._settings = settings
        keys = tuple(key.encode() for key in settings.api_key)
        self._gate = Gate(keys, settings.protect_metrics)
        self._stop = stop or Stop()
        self._hears_signals = stop is None
        service = service or make_service(engine, settings)
        app = build_app(service, self._gate, engine.metrics, settings)
        self._uvicorn = _Uvicorn(_uvicorn_config(app, settings))

    async def run(self, listener: socket.socket, on_ready: Callable[[str], None]) -> None:
        """Until SIGTERM or SIGINT; raises if the model cannot be loaded or the engine dies, and
        SystemExit for a signal before it is loaded."""
        serving = asyncio.create_task(self._uvicorn.serve([listener]))
        others = [asyncio.create_task(self._cut_idle_connections())]
        if (seconds := systemd.watchdog_seconds()) is not None:
            others.append(asyncio.create_task(systemd.feed_watchdog(seconds)))
        try:
            with self._stop.on_signals() if self._hears_signals else contextlib.nullcontext():
                await first_of(self._engine.wait_ready(), self._stop.soon.wait(), serving)
                if self._stop.count:
                    raise ending_with(self._stop.number)  # nothing was promised to anybody
                self._gate.refusal = None
                systemd.notify("READY=1")
                on_ready(self._engine.model_config.served_model_name[0])
                await first_of(self._engine.wait_dead(), self._stop.soon.wait(), serving)
                await self._drain()
        finally:
            await self._close(serving)
            for other in others:
                other.cancel()
        if not self._stop.count:
            raise EngineDeadError(self._engine.dead_reason)

    @property
    def num_active(self) -> int:
        """Requests that are being answered."""
        return self._gate.num_active

    async def _drain(self) -> None:
        """Lets running requests finish, refusing new ones."""
        systemd.notify("STOPPING=1")
        self._gate.refusal = "the server is shutting down"
        if self._engine.is_dead:
            self._gate.refusal = self._engine.dead_reason
            await asyncio.sleep(_DEAD_ENGINE_S)
            return
        if self._gate.num_active:
            logger.info(
                "finishing %d requests, for at most %g s; a second signal stops now",
                self._gate.num_active,
                self._settings.shutdown_timeout,
            )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.shutdown_timeout):
                await first_of(self._until_idle(), self._stop.now.wait(), self._engine.wait_dead())
        if self._gate.num_active:
            logger.warning("stopping with %d requests unfinished", self._gate.num_active)
            await self._engine.shutdown()  # each of them gets an error

    async def _until_idle(self) -> None:
        while self._gate.num_active:
            await asyncio.sleep(0.02)

    async def _close(self, serving: "asyncio.Task[None]") -> None:
        self._uvicorn.should_exit = True
        await asyncio.wait({serving}, timeout=_CLOSE_S)
        for connection in list(self._uvicorn.server_state.connections):
            connection.transport.abort()
        await serving

    async def _cut_idle_connections(self) -> None:
        """Nothing in uvicorn bounds the wait for a request's head or for an answer's last byte."""
        connections: set[Any] = self._uvicorn.server_state.connections
        idle_since: dict[tuple[Any, Any], float] = {}
        limit = envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE + _BEYOND_KEEP_ALIVE_S
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = time.monotonic()
            idle = [
                (connection, connection.cycle)
                for connection in connections
                if connection.cycle is None
                or connection.cycle.response_complete
                or connection.transport.is_closing()
            ]
            idle_since = {key: idle_since.get(key, now) for key in idle}
            for (connection, _), since in idle_since.items():
                if now - since > limit:
                    connection.transport.abort()


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to us: uvicorn would exit with the signal's code."""
        yield


def _uvicorn_config(app: Any, settings: ServerSettings) -> uvicorn.Config:
    log = logging.getLogger("uvicorn")
    log.handlers = logging.getLogger("vllm").handlers
    log.propagate = False
    return uvicorn.Config(
        app,
        http=http_protocol(),
        lifespan="off",
        ws="none",
        log_config=None,
        log_level=settings.uvicorn_log_level,
        # asyncio takes it for what one turn of the loop accepts: of several processes, the idle
        # ones are to do it.
        backlog=1 if settings.api_server_count > 1 else BACKLOG,
        access_log=False,
        server_header=False,
        timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=settings.ssl_cert_reqs,
        ssl_ciphers=settings.ssl_ciphers or "TLSv1",
    )


def make_service(engine: EngineClient, settings: ServerSettings, **shared: Any) -> Service:
    """shared: fields of Service that other processes have a part in."""
    model = engine.model_config
    prompts = Prompts(
        engine.tokenizer,
        model.max_model_len,
        settings.chat_template,
        settings.trust_request_chat_template,
        settings.default_chat_template_kwargs,
    )
    prompts.check_chat_template()
    is_auto = settings.generation_config == "auto"
    generation = model.generation if is_auto else {}
    defaults = generation_defaults({**generation, **settings.override_generation_config})
    # How many tokens is for the request to say: the rest of the context may be less than this.
    defaults.pop("max_tokens", None)
    if defaults:
        logger.info("sampling defaults of this model: %s", defaults)
    return Service(
        engine,
        prompts,
        defaults,
        shared.pop("admission", None)
        or Admission(engine.max_num_seqs, settings.max_waiting or None),
        settings.response_role,
        _answer_formats(settings),
        includes_usage=settings.enable_force_include_usage,
        **shared,
    )


def _answer_formats(settings: ServerSettings) -> AnswerFormats:
    calls, reasoning = settings.tool_call_parser, settings.reasoning_parser
    return AnswerFormats(
        tool_parser(calls, settings.tool_parser_plugin) if calls else None,
        reasoning_format(reasoning) if reasoning else None,
    )
