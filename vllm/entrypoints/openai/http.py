"""HTTP below the endpoints: admission, disconnects, event streams."""

import asyncio
import hashlib
import hmac
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

import msgspec
from fastapi import Response
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.engine.metrics import Metrics
from vllm.entrypoints.openai.anthropic_errors import ANTHROPIC_PATH
from vllm.entrypoints.openai.direct_events import DirectEvents
from vllm.entrypoints.openai.errors import ApiError, as_api_error
from vllm.entrypoints.openai.http_protocol import Connection
from vllm.entrypoints.openai.protocol import REQUEST_ID
from vllm.entrypoints.openai.turns import Turns
from vllm.logger import get_logger
from vllm.logger import request_id as logged_request_id

logger = get_logger(__name__)

T = TypeVar("T")

PAGE_PATHS = frozenset({"/", "/docs", "/redoc"})
"""Pages without a secret, which ask their user for the key that their requests need."""

OPEN_PATHS = PAGE_PATHS | {"/health", "/live", "/ping", "/version", "/metrics"}
"""Answered while loading and while shutting down, and without an API key but for the metrics of a
server that protects them."""

_REQUEST_ID = re.compile(REQUEST_ID)
# The server's own `send`, in the state of a request.
_SEND = "vllm.send"
_METHODS = ("GET", "POST", "OPTIONS", "HEAD", "PUT", "DELETE")
_WEIGHT = re.compile(r"[01](\.\d{0,3})?")  # of a media type in Accept
_SEND_TIMEOUT_S = 60.0


@dataclass
class Gate:
    """State of the server that decides whether a request is admitted.

    protects_metrics: whether they need a key too. refusal: why none is at the moment (loading,
    shutting down), None when open. num_active: requests being answered, those to OPEN_PATHS not
    counted.
    """

    api_keys: tuple[bytes, ...] = ()
    protects_metrics: bool = False
    refusal: str | None = "the model is still loading"
    num_active: int = 0

    def check(self, scope: Scope) -> None:
        """Raises ApiError if this request is not admitted."""
        is_open = scope["path"] in OPEN_PATHS
        if is_open and not (self.protects_metrics and scope["path"] == "/metrics"):
            return
        if self.api_keys and not self._has_key(scope):
            message = (
                "a valid API key is needed: send the header 'Authorization: Bearer KEY' or "
                "'x-api-key: KEY'"
            )
            headers = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, message, code="invalid_api_key", headers=headers)
        if self.refusal is not None and not is_open:
            headers = {"Retry-After": "1", "Connection": "close"}
            raise ApiError(503, self.refusal, code="unavailable", headers=headers)

    def client(self, scope: Scope) -> str:
        """Who asks: the hash of its key where keys are needed, else its address."""
        given = self._given_keys(scope)
        for known in self.api_keys:
            if known in given:  # which it is, tells no more than that it is one
                return hashlib.sha256(known).hexdigest()[:12]
        return scope["client"][0] if scope["client"] else ""

    def _given_keys(self, scope: Scope) -> list[bytes]:
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").encode("latin-1").partition(b" ")
        given = [key.strip()] if scheme.lower() == b"bearer" else []
        given += [headers["x-api-key"].encode("latin-1")] if "x-api-key" in headers else []
        return given

    def _has_key(self, scope: Scope) -> bool:
        given = self._given_keys(scope)
        # Every key is compared in full, so that the time taken tells nothing about any of them.
        matches = [hmac.compare_digest(key, known) for key in given for known in self.api_keys]
        return any(matches)


@dataclass
class GateMiddleware:
    """Request ids, turns, admission, handling of unexpected errors, request counts and the access
    log."""

    app: ASGIApp
    gate: Gate
    metrics: Metrics
    known_paths: frozenset[str]
    root_path: str
    logs_requests: bool
    turns: Turns = field(default_factory=Turns)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = _request_id(scope)
        scope["root_path"] = self.root_path
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state[_SEND] = send
        logged_request_id.set(request_id)
        start, status = time.monotonic(), 499  # the client left before an answer

        async def send_tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                is_anthropic = scope["path"].startswith(ANTHROPIC_PATH)
                name = b"request-id" if is_anthropic else b"x-request-id"
                own_id = state["request_id"].encode()  # which the body may have set
                message["headers"] = [*message["headers"], (name, own_id)]
            await send(message)

        is_open = scope["path"] in OPEN_PATHS
        self.gate.num_active += not is_open
        try:
            if not is_open:
                await self.turns.wait()
            self.gate.check(scope)
            await self.app(scope, receive, send_tagged)
        except Exception as error:
            if status == 499:
                response = as_api_error(error).response(scope["path"])
                await response(scope, receive, send_tagged)
        finally:
            self.gate.num_active -= not is_open
            path = scope["path"] if scope["path"] in self.known_paths else "other"
            method = scope["method"] if scope["method"] in _METHODS else "other"
            elapsed = time.monotonic() - start
            self.metrics.record_http(path, method, status, elapsed)
            if self.logs_requests and not is_open:
                own_id = state["request_id"]
                http = {"method": method, "path": path, "status": status,
                        "seconds": round(elapsed, 4)}  # fmt: skip
                logger.info("%s %s %s %d %.3f s", own_id, scope["method"], path, status, elapsed,
                            extra={"request_id": own_id, "http": http})  # fmt: skip


def prefers_html(accept: Sequence[str]) -> bool:
    """Whether `Accept` headers ask for a page rather than JSON, as those of a browser do: text/html
    has the greatest weight, and of equal ones comes first."""
    wanted = []
    for position, item in enumerate(",".join(accept).split(",")):
        media, *parameters = (part.strip().lower() for part in item.split(";"))
        weight = next((p[2:] for p in parameters if p.startswith("q=")), "1")
        value = float(weight) if _WEIGHT.fullmatch(weight) else 0.0
        wanted.append((-value, position, media))
    lowest, _, media = min(wanted)
    return lowest < 0 and media == "text/html"


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes away (ClientDisconnect)."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class EventStream(Response):
    """Server-sent events: `first`, then the items of `rest`, each of one event or more.

    A new item is asked for only when the client has taken the ones before; one that takes none for
    long, or goes away, ends the generator, which tells its errors and its end by events of its own.
    direct: writes events while an item is waited for.
    """

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, rest: AsyncGenerator[bytes, None], direct: DirectEvents | None = None
    ):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._direct = direct
        self._sends_since: float | None = None
        self._is_slow = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # What wraps `send` is interested in the begin of a response, and costs at every event.
        sending = asyncio.ensure_future(self._send_all(send, scope["state"][_SEND]))
        watch = asyncio.ensure_future(self._watch(sending))
        try:
            await until_disconnect(receive, sending)
        except asyncio.CancelledError:
            if not self._is_slow:
                raise
            logger.warning("a client took nothing for %.0f s; its stream ends", _SEND_TIMEOUT_S)
        except ClientDisconnect:
            pass
        finally:
            watch.cancel()
            await self._rest.aclose()

    async def _watch(self, sending: "asyncio.Future[None]") -> None:
        """Ends the stream of a client that takes nothing. A timeout per event would cost more than
        making the event."""
        loop = asyncio.get_running_loop()
        while not self._is_slow:
            await asyncio.sleep(_SEND_TIMEOUT_S / 4)
            since = self._sends_since
            self._is_slow = since is not None and loop.time() - since >= _SEND_TIMEOUT_S
        sending.cancel()

    async def _send_all(self, send: Send, send_body: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if self._direct is not None:
            self._direct.connection = Connection.of(send_body)
        body, time = self._first, asyncio.get_running_loop().time
        while body:
            self._sends_since = time()
            await send_body({"type": "http.response.body", "body": body, "more_body": True})
            self._sends_since = None
            body = await anext(self._rest, b"")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def named_event(data: Mapping[str, Any]) -> bytes:
    """A server-sent event with the name `type` of its data."""
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), msgspec.json.encode(data))


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _request_id(scope: Scope) -> str:
    return given_request_id(scope) or uuid4().hex


def given_request_id(scope: Scope) -> str:
    """The header X-Request-Id; empty where there is none that can be used."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else ""
