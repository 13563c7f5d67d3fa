"""One of several processes that answer HTTP: what it shares with the others is asked of its parent.

Imports nothing heavy at load: its parent imports it to start it.
"""

import asyncio
import itertools
import multiprocessing
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.api_client import ApiClient
from vllm.engine.api_messages import ServerState, Serving
from vllm.engine.process import Call, Failed
from vllm.entrypoints.openai.http_setup import prepare_process, tracer_of
from vllm.entrypoints.openai.settings import ServerSettings
from vllm.entrypoints.openai.stop import Stop
from vllm.errors import EngineDeadError, VllmError
from vllm.executor.messages import leave_signals_to_parent
from vllm.utils.heartbeat import PULSE, Activity, Page
from vllm.utils.processes import die_with_parent
from vllm.utils.startup import no_collections, settle_collections

if TYPE_CHECKING:
    from vllm.entrypoints.openai.generation import Service


def run_api_process(
    config: VllmConfig,
    settings: ServerSettings,
    listener: socket.socket,
    control: str,
    name: str,
    place: int,
    created: int,
    page: Page,
) -> None:
    """Body of the process. control, name, place: of its ApiClient; created: the Unix time that the
    model is said to be of; page: of its heartbeats."""
    parent = multiprocessing.parent_process()
    die_with_parent(parent.pid if parent is not None else None)
    PULSE.attach(page, 0)
    leave_signals_to_parent()
    envs.set_for_children("NOTIFY_SOCKET", None)  # the parent speaks with systemd
    prepare_process()
    shared = _SharedListener(listener.family, listener.type, listener.proto, listener.detach())
    with asyncio.Runner() as loop:
        sys.exit(loop.run(_serve(config, settings, shared, control, name, place, created)))


class _SharedListener(socket.socket):
    def listen(self, backlog: int = 0) -> None:
        """It listens already; its backlog is that of all processes."""


async def _serve(
    config: VllmConfig,
    settings: ServerSettings,
    listener: socket.socket,
    control: str,
    name: str,
    place: int,
    created: int,
) -> int:
    """The exit code: 0 after all requests were answered, 1 where the engine died."""
    from vllm.engine.tokenizer import load_tokenizer

    tokenizer, failure = None, None
    with no_collections():
        try:
            if not config.model_config.skip_tokenizer_init:
                tokenizer = load_tokenizer(config.model_config)
        except VllmError as error:
            failure = error
        client = ApiClient(config, tokenizer, control, name, place)
        client.tracer = tracer_of(client, settings)

    def on_ready(_: str) -> None:
        settle_collections()
        client.tell(Serving())

    try:
        if failure is not None:
            raise failure
        with no_collections():
            from vllm.entrypoints.openai.server import Server

            stop = Stop()

            def follow(state: ServerState) -> None:
                stop.raise_to(state.num_stops)

            client.on_state = follow
            server = Server(client, settings, stop, _service(client, settings, created))
            client.num_active = lambda: server.num_active
        await client.start()
        PULSE.enter(Activity.IDLE)
        await server.run(listener, on_ready)
    except EngineDeadError:
        return 1
    except VllmError as error:
        client.tell(Failed(str(error), is_user_error=True))
        return 2
    finally:
        await client.shutdown()
    return 0


def _service(client: ApiClient, settings: ServerSettings, created: int) -> "Service":
    from vllm.entrypoints.openai.server import make_service
    from vllm.entrypoints.openai.shared_responses import SharedResponses

    return make_service(
        client,
        settings,
        admission=_SharedAdmission(client, is_limited=settings.max_waiting > 0),
        responses=SharedResponses(client.ask),
        created=created,
        numbers=(f"{client.name}{number}" for number in itertools.count()),
    )


class _SharedAdmission:
    """`vllm.engine.admission.Admission` of the parent."""

    def __init__(self, client: ApiClient, is_limited: bool):
        self._client = client
        self._is_limited = is_limited
        self._keys = itertools.count()

    @asynccontextmanager
    async def place(self, client: str, num_sequences: int) -> AsyncIterator[None]:
        if not self._is_limited:
            yield
            return
        key = next(self._keys)
        try:
            await self._client.ask("admit", key, client, num_sequences)
            yield
        finally:  # also of what was asked for and not waited for
            self._client.tell(Call(0, "release", [key]))
