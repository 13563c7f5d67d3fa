"""A small HTTP/1.1 client on asyncio streams: enough to time a streaming server exactly."""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

_LINE_LIMIT = 16 << 20


class HttpError(Exception):
    """An answer that is not 200, or none at all."""


@dataclass(frozen=True)
class HttpClient:
    """One server. Every request has a connection of its own."""

    host: str
    port: int
    is_tls: bool
    prefix: str
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, base_url: str, api_key: str | None = None) -> "HttpClient":
        parts = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        is_tls = parts.scheme == "https"
        headers = (("Authorization", f"Bearer {api_key}"),) if api_key else ()
        port = parts.port or (443 if is_tls else 80)
        return cls(parts.hostname or "localhost", port, is_tls, parts.path.rstrip("/"), headers)

    async def first_model(self) -> str:
        """The first that the server lists; HttpError for none."""
        try:
            return str((await self.get_json("/v1/models"))["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise HttpError(f"/v1/models lists no model ({error!r})") from error

    async def get_json(self, path: str) -> Any:
        return await self._json("GET", path, None)

    async def post_json(self, path: str, body: Any) -> Any:
        return await self._json("POST", path, body)

    async def post_events(self, path: str, body: Any) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed answer, each as soon as it has arrived; HttpError."""
        rest = b""
        async with self._exchange("POST", path, body) as pieces:
            async for piece in pieces:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    if data and line.startswith(b"data:"):
                        event = json.loads(data)
                        if "error" in event:
                            raise HttpError(str(event["error"]))
                        yield event
        raise HttpError("the stream ended before [DONE]")

    async def _json(self, method: str, path: str, body: Any) -> Any:
        async with self._exchange(method, path, body) as pieces:
            return json.loads(b"".join([piece async for piece in pieces]))

    @asynccontextmanager
    async def _exchange(
        self, method: str, path: str, body: Any
    ) -> AsyncGenerator[AsyncGenerator[bytes, None], None]:
        """Sends a request; yields the pieces of its body. HttpError unless it is a 200."""
        context = ssl.create_default_context() if self.is_tls else None
        try:
            reader, writer = await asyncio.open_connection(
                self.host, self.port, ssl=context, limit=_LINE_LIMIT
            )
        except OSError as error:
            raise HttpError(f"cannot connect to {self.host}:{self.port}: {error}") from error
        try:
            writer.write(self._request(method, path, body))
            status, headers = await _read_head(reader)
            pieces = _read_pieces(reader, headers)
            if status != 200:
                text = b"".join([piece async for piece in pieces]).decode(errors="replace")
                raise HttpError(f"HTTP {status}: {text[:300]}")
            yield pieces
        except (OSError, EOFError, ValueError) as error:
            raise HttpError(f"{type(error).__name__}: {error}") from error
        finally:
            writer.close()

    def _request(self, method: str, path: str, body: Any) -> bytes:
        data = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
            "Connection: close",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + data


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    try:
        text = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        raise HttpError("the server closed the connection without an answer") from None
    head = text.decode("latin-1").split("\r\n")
    fields = (line.partition(":") for line in head[1:] if line)
    return int(head[0].split()[1]), {n.lower(): v.strip() for n, _, v in fields}


async def _read_pieces(
    reader: asyncio.StreamReader, headers: dict[str, str]
) -> AsyncGenerator[bytes, None]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := await _read_size(reader):
            yield (await reader.readexactly(size + 2))[:-2]
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(65536):
            yield piece


async def _read_size(reader: asyncio.StreamReader) -> int:
    line = await reader.readline()
    if not line:
        raise HttpError("the server closed the connection in the middle of its answer")
    return int(line.split(b";")[0], 16)
