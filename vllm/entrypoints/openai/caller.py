"""Who sends a request, and until when it may be answered."""

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.types import Scope

from vllm.engine.request_traces import TRACE_HEADERS
from vllm.entrypoints.openai.errors import ApiError

TIMEOUT_HEADER = "X-Request-Timeout"

Item = TypeVar("Item")


@dataclass(frozen=True)
class Caller:
    """client: the hash of its API key, or its address. timeout: seconds that the request may take,
    as `source` sets them; None for any. deadline: by the clock of the event loop. trace_headers:
    name the span that the request is a part of."""

    client: str = ""
    timeout: float | None = None
    source: str = ""
    deadline: float | None = None
    trace_headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, scope: Scope, client: str, most: float | None) -> "Caller":
        """Of a request that begins now. most: what --request-timeout allows. ApiError 400 for a
        header that is no number of seconds."""
        timeout, source = most, "--request-timeout"
        headers = Headers(scope=scope)
        traced = {name: headers[name] for name in TRACE_HEADERS if name in headers}
        given = headers.get(TIMEOUT_HEADER)
        if given is not None:
            seconds = _seconds(given)
            if timeout is None or seconds < timeout:
                timeout, source = seconds, TIMEOUT_HEADER
        if timeout is None:
            return cls(client, trace_headers=traced)
        deadline = asyncio.get_running_loop().time() + timeout
        return cls(client, timeout, source, deadline, traced)

    def in_time(self, items: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
        """The items until the deadline; then `items` is cancelled, and ApiError 504 raised."""
        return items if self.deadline is None else self._in_time(items)

    async def _in_time(self, items: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
        async with aclosing(items):
            while True:
                try:
                    async with asyncio.timeout_at(self.deadline) as limit:
                        item = await anext(items)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    if not limit.expired():
                        raise
                    raise self._too_late() from None
                yield item

    def _too_late(self) -> ApiError:
        message = (
            f"the request was not finished within {self.timeout:g} s, the limit that {self.source} "
            f"sets; ask for fewer tokens or try again later"
        )
        return ApiError(504, message, code="request_timeout")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ApiError(400, f"{TIMEOUT_HEADER} {text[:40]!r}: it takes a number of seconds above 0")
    return seconds
