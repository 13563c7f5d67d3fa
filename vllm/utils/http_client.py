"""Client of an OpenAI-compatible server."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self

import aiohttp

from vllm.errors import VllmError

_KEEP_ALIVE_S = 2.0
_EVENT_FIELDS = (b"data", b"event", b"id", b"retry", b"")


class HttpError(VllmError):
    """A response that is not 200 or breaks off, or no response at all."""


class HttpClient:
    """One server; used as `async with`.

    base_url: http where it names no scheme; paths are appended to it. read_timeout: seconds without
    a byte, None for no limit. uses_proxy: by HTTP_PROXY and the like. keeps_connections: reuses
    them, which costs a third less CPU time per request than opening one for each, and fails where
    a server closes one at the moment it is reused.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        read_timeout: float | None = None,
        uses_proxy: bool = False,
        keeps_connections: bool = False,
    ):
        self._url = (base_url if "//" in base_url else f"http://{base_url}").rstrip("/")
        self._connections: dict[str, Any] = (
            {"keepalive_timeout": _KEEP_ALIVE_S} if keeps_connections else {"force_close": True}
        )
        self._options: dict[str, Any] = {
            "headers": {"Authorization": f"Bearer {api_key}"} if api_key else {},
            "timeout": aiohttp.ClientTimeout(total=None, sock_read=read_timeout),
            "trust_env": uses_proxy,
            "json_serialize": partial(json.dumps, separators=(",", ":")),
        }

    async def __aenter__(self) -> Self:
        # No limit: how many requests are in flight is the caller's decision. A connection is kept
        # for less time than servers keep theirs, uvicorn's default of 5 s included.
        connector = aiohttp.TCPConnector(limit=0, **self._connections)
        self._session = aiohttp.ClientSession(connector=connector, **self._options)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def first_model(self, path: str = "/v1/models") -> str:
        """The first that the server lists; HttpError for none."""
        try:
            return str((await self.get_json(path))["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise HttpError(
                f"{self._url}{path} lists no model ({error!r}): is it the address of an "
                f"OpenAI-compatible server?"
            ) from error

    async def get_text(self, path: str) -> str:
        async with self._request("GET", path) as response:
            return (await response.read()).decode(errors="replace")

    async def get_json(self, path: str) -> Any:
        return await self._json("GET", path)

    async def post_json(self, path: str, body: Any) -> Any:
        return await self._json("POST", path, json=body)

    async def post_events(self, path: str, body: Any) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed response, each as soon as it has arrived; HttpError."""
        rest = b""
        async with self._request("POST", path, json=body) as response:
            async for piece in response.content.iter_any():
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    name, _, data = line.strip().partition(b":")
                    if name == b"data" and data.strip() == b"[DONE]":
                        return
                    if name not in _EVENT_FIELDS:
                        raise HttpError(f"{self._url}{path} sends no events: {line!r:.80}")
                    if name == b"data":
                        yield self._event(path, data)
        raise HttpError(f"{self._url}{path}: the response ended early; see the server's log")

    def _event(self, path: str, data: bytes) -> dict[str, Any]:
        event: dict[str, Any] = self._parsed(path, data, "sends no events of JSON")
        if "error" in event:
            raise HttpError(f"{self._url}{path}: {_message_of(event)}")
        return event

    async def _json(self, method: str, path: str, **options: Any) -> Any:
        async with self._request(method, path, **options) as response:
            content = await response.read()
        return self._parsed(path, content, "answers no JSON")

    def _parsed(self, path: str, text: bytes, otherwise: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise HttpError(f"{self._url}{path} {otherwise}: {text!r:.80}") from error

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, **options: Any
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """A response of status 200; HttpError for any other and for what goes wrong."""
        url = f"{self._url}{path}"
        try:
            async with self._session.request(method, url, **options) as response:
                if response.status != 200:
                    text = (await response.read()).decode(errors="replace")
                    try:
                        text = _message_of(json.loads(text))
                    except ValueError:
                        text = text or str(response.reason)
                    raise HttpError(f"{url}: HTTP {response.status}: {text[:300]}")
                yield response
        except aiohttp.ClientConnectorError as error:
            raise HttpError(
                f"no server answers at {self._url} ({error.os_error}); start one with `vllm serve` "
                f"or give another address"
            ) from error
        except aiohttp.ServerDisconnectedError as error:
            raise HttpError(
                f"{url}: the server closed the connection without a response"
            ) from error
        except aiohttp.ClientPayloadError as error:
            raise HttpError(f"{url}: the response broke off ({error}); see its log") from error
        except (aiohttp.ClientError, OSError) as error:
            raise HttpError(f"{url}: {type(error).__name__}: {error}") from error


def _message_of(body: Any) -> str:
    """Of an error as the OpenAI API words it."""
    try:
        return str(body["error"]["message"])
    except (LookupError, TypeError):
        return str(body)
