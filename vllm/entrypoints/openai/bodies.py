"""Bodies of requests: read within limits, and made a request beside the event loop.

Whoever holds the interpreter lock for long stalls every other request, in a thread too. So a body
is measured before it is parsed: what one parses and validates is bounded by `LIMITS`, which no
honest request comes near.
"""

import asyncio
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import NoneType
from typing import Any, TypeVar

import msgspec
from fastapi import Request

from vllm.entrypoints.openai.errors import ApiError

T = TypeVar("T")

CHAT_BYTES = 64 << 20
OTHER_BYTES = 8 << 20
_CHAT_PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
MAX_TOTAL_BYTES = 1 << 30
"""Of all bodies that are being read, or wait to be parsed."""

INLINE_BYTES = 64 << 10
"""Longer bodies are parsed in a thread."""

MAX_DEPTH = 128
MAX_MEMBERS = 64
"""Of a gzip body."""

MAX_FIELDS = 16384
"""Of one object."""

# By characters outside of texts, which there is one of for each.
LIMITS = {
    "objects and arrays": (b"{[", 100_000),
    "texts": (b'"', 2 * 1_000_000),
    "fields": (b":", 500_000),
    "values": (b",", 4_000_000),
}
_PER_TEXT = 2
_SLICE = 1 << 20

_JSON_TYPES = ("application/json", "text/json")
_BODY_TIMEOUT_S = 120.0
_PARSE_TIMEOUT_S = 60.0
# An oversized body is read on for so long before 413 is sent: answering at once would reset the
# connection of a client that is still sending, and it would never see the answer.
_DISCARD_BYTES = 256 << 20
_DISCARD_S = 20.0


class BodyReader:
    """max_bytes: of one body, inflated; None for the defaults of each path."""

    def __init__(self, max_bytes: int | None = None):
        self._max_bytes = max_bytes
        self._num_bytes = 0
        # One: two would only take the interpreter lock from each other, and from the event loop.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")

    async def read(self, request: Request, parse: Callable[[dict[str, Any]], T]) -> T:
        """`parse` of the JSON object in the body; ApiError if the body is too large, too slow or
        something else."""
        _check_media_type(request)
        held = _Held(self)
        try:
            body = await self._whole(request, held)
            coding = request.headers.get("content-encoding", "identity").strip().lower()
            if coding not in ("identity", "gzip"):
                text = f"Content-Encoding {coding:.40} is not supported: send gzip or none"
                raise ApiError(415, text)
            max_bytes = self.max_bytes(request.scope["path"])
            if coding == "identity" and len(body) <= INLINE_BYTES:
                return parse(parse_object(body))
            return await self._aside(_parsed, body, coding == "gzip", max_bytes, parse)
        finally:
            held.release()

    def max_bytes(self, path: str) -> int:
        if self._max_bytes is not None:
            return self._max_bytes
        return CHAT_BYTES if path.startswith(_CHAT_PATHS) else OTHER_BYTES

    async def _aside(self, work: Callable[..., T], *arguments: Any) -> T:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_PARSE_TIMEOUT_S):
                return await loop.run_in_executor(self._thread, work, *arguments)
        except TimeoutError:
            text = "the server is busy with the bodies of other requests; send it again later"
            raise ApiError(503, text, headers={"Retry-After": "10"}) from None

    async def _whole(self, request: Request, held: "_Held") -> bytearray:
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                return await _read(request, self.max_bytes(request.scope["path"]), held)
        except TimeoutError:
            message = f"the body did not arrive within {_BODY_TIMEOUT_S:.0f} s"
            raise ApiError(408, message, headers={"Connection": "close"}) from None


class _Held:
    """What one body has of the memory for all bodies."""

    def __init__(self, reader: BodyReader):
        self._reader = reader
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._reader._num_bytes += num_bytes
        if self._reader._num_bytes > MAX_TOTAL_BYTES:
            text = f"the bodies of requests take more than {MAX_TOTAL_BYTES >> 20} MiB; try later"
            raise ApiError(503, text, headers={"Retry-After": "10", "Connection": "close"})

    def release(self) -> None:
        self._reader._num_bytes -= self._num_bytes
        self._num_bytes = 0


def _check_media_type(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in _JSON_TYPES and not media_type.endswith("+json"):
        given = f"not {media_type:.80}" if media_type else "which is missing"
        raise ApiError(415, f"send the header Content-Type: application/json, {given}")


async def _read(request: Request, max_bytes: int, held: _Held) -> bytearray:
    declared = request.headers.get("content-length", "")
    too_large = _too_large(max_bytes)
    if declared.isdigit() and int(declared) > max_bytes:
        expects_continue = request.headers.get("expect", "").lower() == "100-continue"
        if expects_continue or int(declared) > _DISCARD_BYTES:
            raise too_large
    body, size = bytearray(), 0
    deadline = time.monotonic() + _DISCARD_S
    async for piece in request.stream():
        size += len(piece)
        if size <= max_bytes:
            held.take(len(piece))
            body += piece
        else:
            body.clear()
            held.release()
            if size > _DISCARD_BYTES or time.monotonic() > deadline:
                break
    if size > max_bytes:
        raise too_large
    return body


def _too_large(max_bytes: int) -> ApiError:
    message = f"the body is larger than {max_bytes} bytes, the limit that --max-request-bytes sets"
    return ApiError(413, message, headers={"Connection": "close"})


def _parsed(
    body: bytearray, is_gzip: bool, max_bytes: int, parse: Callable[[dict[str, Any]], T]
) -> T:
    return parse(parse_object(_inflated(body, max_bytes) if is_gzip else body))


def _inflated(body: bytearray, max_bytes: int) -> bytearray:
    """The content of one or several gzip members, of which no more than `max_bytes` is made."""
    content, rest = bytearray(), bytes(body)
    try:
        for _ in range(MAX_MEMBERS):  # each copies the rest
            if not rest:
                return content
            member = zlib.decompressobj(wbits=31)
            content += member.decompress(rest, max_bytes + 1 - len(content))
            if len(content) > max_bytes:
                raise _too_large(max_bytes)
            if not member.eof:
                raise ApiError(400, "the gzip body ends too early")
            rest = member.unused_data
    except zlib.error as error:
        raise ApiError(400, f"the body is no valid gzip: {error}") from None
    if rest:
        raise ApiError(400, f"the gzip body has more than {MAX_MEMBERS} members")
    return content


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """The JSON object `body`; ApiError if it is none, or beyond the limits of this module."""
    if not body.strip():
        raise ApiError(400, "the body is empty: send a JSON object")
    if len(body) > INLINE_BYTES:
        _check_counts(body)
    try:
        value = msgspec.json.decode(body)  # strict: no NaN, no Infinity, no lone surrogates
    except RecursionError:
        raise ApiError(400, f"the JSON body is nested deeper than {MAX_DEPTH} levels") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, not {_json_kind(value)}")
    _check_shape(value)
    return value


def _check_counts(body: bytes | bytearray) -> None:
    """ApiError for more than `LIMITS` of anything. Every step takes milliseconds, whatever the
    body holds; up to its first mistake a body that is no JSON is counted as one that is."""
    if _exceeded(body) is None:
        return
    # Its texts may have the characters that are counted.
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    _, most_quotes = LIMITS["texts"]
    if bare.count(b'"') <= most_quotes:
        pieces = bare.split(b'"')
        bare = bytearray(b'"').join(pieces[::2]) + b'"' * (len(pieces) // 2)
    if (exceeded := _exceeded(bare)) is not None:
        most = LIMITS[exceeded][1] // (_PER_TEXT if exceeded == "texts" else 1)
        raise ApiError(400, f"the JSON body has more than {most} {exceeded}; split the request")


def _exceeded(body: bytes | bytearray) -> str | None:
    """In slices, between which other threads go on."""
    counts = dict.fromkeys(LIMITS, 0)
    for start in range(0, len(body), _SLICE):
        piece = body[start : start + _SLICE]
        for name, (marks, most) in LIMITS.items():
            counts[name] += sum(map(piece.count, marks))
            if counts[name] > most:
                return name
    return None


def _json_kind(value: Any) -> str:
    return {list: "an array", str: "a text", bool: "a boolean", NoneType: "null"}.get(
        type(value), "a number"
    )


def _check_shape(value: dict[str, Any]) -> None:
    """ApiError for one that is nested too deeply, or has an object of too many fields."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        for container in level:
            if type(container) is dict and len(container) > MAX_FIELDS:
                text = f"the JSON body has an object of {len(container)} fields"
                raise ApiError(400, f"{text}; at most {MAX_FIELDS} are accepted")
        level = [
            child
            for container in level
            for child in (container.values() if type(container) is dict else container)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return
    raise ApiError(400, f"the JSON body is nested deeper than {MAX_DEPTH} levels")
