"""The engine client of one of several API processes: another process started the engines."""

import asyncio
import dataclasses
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from vllm.config import VllmConfig
from vllm.engine import process
from vllm.engine.api_messages import (
    Answer,
    FromClient,
    Hello,
    Poll,
    Report,
    ServerState,
    ToClient,
)
from vllm.engine.engine_client import EngineClient
from vllm.engine.input_processor import InputProcessor
from vllm.engine.metrics_sum import families_of
from vllm.errors import EngineDeadError
from vllm.logger import get_logger

logger = get_logger(__name__)


class _Link:
    """A connection to an engine, and its answers."""

    def __init__(self, context: zmq.asyncio.Context, name: str, rank: int, state: ServerState):
        self.rank = rank
        self.is_lockstep = state.is_lockstep
        self.num_in_flight = 0
        self.wire = _connected(context, state.addresses[rank], name)

    def send(self, message: process.ToEngine) -> None:
        if not self.wire.closed:  # else the next engine gets what is unsent
            self.wire.send(process.encode(message))


class ApiClient(EngineClient):
    """control: ZMQ address of the process that started the engines, which answers what concerns all
    API processes. name: unique among all that have been. num_active: requests being answered.
    on_state: called with each new state."""

    def __init__(self, config: VllmConfig, tokenizer: Any, control: str, name: str, place: int):
        """place: of this process among the API processes."""
        num_engines = max(1, config.parallel_config.data_parallel_size)
        super().__init__(config, tokenizer, num_engines)
        self.name = name
        self.num_active = lambda: 0
        self.on_state = lambda state: None
        self._place = place
        self._state = ServerState([], False, self.model_config.max_model_len, "", "", 0, "", False)
        self._context = zmq.asyncio.Context()
        self._control = _connected(self._context, control, name)
        self._encoder = msgspec.msgpack.Encoder()
        self._links: list[_Link] = []
        self._reading: list[asyncio.Task[None]] = []
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._num_asked = 0
        self._ready, self._informed = asyncio.Event(), asyncio.Event()
        self._listening: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when the state of the engines is known: one that takes another's place answers
        its first request."""
        self._listening = asyncio.create_task(self._listen())
        self.tell(Hello())
        await self._informed.wait()

    @property
    def _engines(self) -> list[_Link]:
        return self._links

    @property
    def _restarting(self) -> tuple[str, int] | None:
        state = self._state
        return (state.restart_reason, state.seconds_to_ready) if state.restart_reason else None

    @property
    def trouble(self) -> str:
        return self.dead_reason or self._state.restart_reason or self._state.trouble

    async def _when_ready(self) -> None:
        if not self.is_dead:
            await self._ready.wait()

    async def ask(self, method: str, *arguments: Any) -> Any:
        """What the starting process answers; raises the VllmError that it raised."""
        if self._control.closed:
            raise EngineDeadError(self.dead_reason)
        self._num_asked += 1
        number = self._num_asked
        waiting = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self.tell(process.Call(number, method, [*arguments]))
            return await waiting
        finally:
            del self._asked[number]

    def tell(self, message: FromClient) -> None:
        if not self._control.closed:
            self._control.send(self._encoder.encode(message))

    async def call_engines(self, method: str, *arguments: Any) -> list[Any]:
        return [await self.ask(method, *arguments)]

    async def kernels(self) -> dict[str, Any]:
        answer: dict[str, Any] = await self.ask("kernels")
        return answer

    async def render_metrics(self) -> bytes:
        return bytes(await self.ask("render_metrics"))

    async def server_load(self, own: int) -> int:
        return int(await self.ask("server_load"))

    async def _listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(ToClient)
        try:
            while True:
                self._take(decoder.decode(await self._control.recv()))
                await asyncio.sleep(0)  # recv does not yield while messages are queued
        except Exception as error:
            logger.exception("cannot process a message of the server's first process")
            self._end(f"a message could not be processed ({error!r}); restart the server")

    def _take(self, message: ToClient) -> None:
        if isinstance(message, ServerState):
            self._follow(message)
        elif isinstance(message, Poll):
            self.tell(self._report(message.number))
        else:
            self._take_answer(message)

    def _take_answer(self, answer: Answer) -> None:
        waiting = self._asked.get(answer.number)
        if waiting is None or waiting.done():  # nobody waits any more
            return
        if (error := answer.error()) is not None:
            waiting.set_exception(error)
        else:
            waiting.set_result(answer.value)

    def _report(self, number: int) -> Report:
        ranks = range(len(self.metrics.engines))
        unfinished = [self.num_unfinished(rank) for rank in ranks]
        return Report(number, families_of(self.metrics.registry), unfinished, self.num_active())

    def _follow(self, state: ServerState) -> None:
        before, self._state = self._state, state
        self.is_asleep = state.is_asleep
        if state.addresses != before.addresses:
            if before.addresses:
                self._disconnect()
                self._interrupt(state.restart_reason or "the engine is being started again")
            if state.addresses:
                self._connect(state)
        if state.dead_reason and not self.is_dead:
            self._end(state.dead_reason)
            self._ready.set()
        self.on_state(state)
        self._informed.set()

    def _connect(self, state: ServerState) -> None:
        model = dataclasses.replace(self.model_config, max_model_len=state.max_model_len)
        self.vllm_config = dataclasses.replace(self.vllm_config, model_config=model)
        self._inputs = InputProcessor(self.vllm_config, self.tokenizer)
        links = [
            _Link(self._context, self.name, rank, state) for rank in range(len(state.addresses))
        ]
        self._reading = [asyncio.create_task(self._read_outputs(link)) for link in links]
        # Ties go to the first: that of each API process is another one.
        first = self._place % len(links)
        self._links = links[first:] + links[:first]
        self._ready.set()
        self._resume()

    def _disconnect(self) -> None:
        for task in self._reading:
            task.cancel()
        for link in self._links:
            link.wire.close()

    async def _read_outputs(self, link: _Link) -> None:
        decoder = process.decoder()
        try:
            while True:
                message = decoder.decode(await link.wire.recv())
                assert isinstance(message, process.Outputs)
                self._take_outputs(link, message)
                await asyncio.sleep(0)  # recv does not yield while messages are queued
        except Exception as error:
            logger.exception("cannot process the engine's outputs")
            self._end(f"outputs could not be processed ({error!r}); restart the server")

    def _end(self, reason: str) -> None:
        super()._end(reason)
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(EngineDeadError(reason))

    def shutdown(self) -> "asyncio.Task[None]":
        return asyncio.get_running_loop().create_task(self._shut_down())

    async def _shut_down(self) -> None:
        if not self.is_dead:
            self._is_stopping = True
            self._end("the server is shutting down")
        self._disconnect()
        if self._listening is not None:
            self._listening.cancel()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)
        self._control.close(linger=500)
        self._context.destroy()


def _connected(context: zmq.asyncio.Context, address: str, name: str) -> "zmq.asyncio.Socket":
    wire = context.socket(zmq.DEALER)
    wire.setsockopt(zmq.ROUTING_ID, name.encode())
    wire.setsockopt(zmq.LINGER, 0)
    wire.set_hwm(0)
    wire.connect(address)
    return wire
