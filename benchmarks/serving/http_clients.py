"""Streaming clients of /v1/completions in one process, as cheap as they can be: bench_http.py
starts several of these.

A plan comes as a line of JSON (`Plan`); "ready" is answered when all requests are made, and the
next line starts them. Then one line of JSON comes back: {"requests": [[start, first, end, events],
...], "gaps": [...], "cpu_s": ..., "wall_s": ...}. Times are those of CLOCK_MONOTONIC in seconds;
gaps are those between two events of a stream, 0 where they were read together.
"""

import asyncio
import json
import random
import sys
import time
from array import array
from dataclasses import asdict, dataclass

_EVENT = b"data: {"
_END = b'"finish_reason":"length"'
_FIRST_ID = 300  # those before are bytes and special tokens of many vocabularies


@dataclass(frozen=True)
class Request:
    """seed: of the prompt's token ids. num_in, num_out: tokens."""

    seed: str
    num_in: int
    num_out: int

    def prompt(self, vocab_size: int) -> list[int]:
        """Token ids, but for the last thousand: special ones of large vocabularies."""
        end = max(vocab_size - 1000, vocab_size // 2)
        return random.Random(self.seed).choices(range(min(_FIRST_ID, end // 2), end), k=self.num_in)


@dataclass(frozen=True)
class Plan:
    """clients: of each its requests, one after another."""

    port: int
    vocab_size: int
    temperature: float
    clients: list[list[Request]]

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def of(cls, line: str) -> "Plan":
        fields = json.loads(line)
        clients = [[Request(**one) for one in own] for own in fields.pop("clients")]
        return cls(**fields, clients=clients)


def http_request(request: Request, plan: Plan) -> bytes:
    fields = {
        "prompt": request.prompt(plan.vocab_size),
        "max_tokens": request.num_out,
        "temperature": plan.temperature,
        "ignore_eos": True,
        "stream": True,
    }
    body = json.dumps(fields).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{plan.port}\r\n"
        f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    )
    return head.encode() + b"\r\n" + body


class _Stream(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, request: bytes, gaps: "array[float]"):
        self.start = time.monotonic()
        self.first = self.last = 0.0
        self.num_events = 0
        self.is_whole = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._gaps = gaps
        self._head = self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._head = self._head or data[:500]
        data = self._tail + data
        self.is_whole = self.is_whole or _END in data
        if count := data.count(_EVENT) - self._tail.count(_EVENT):
            now = time.monotonic()
            if self.num_events:
                self._gaps.append(now - self.last)
            else:
                self.first = now
            self._gaps.extend([0.0] * (count - 1))
            self.last, self.num_events = now, self.num_events + count
        self._tail = data[-len(_END) :]  # what of a mark may be completed by the next bytes

    def connection_lost(self, error: Exception | None) -> None:
        if self.is_whole:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(RuntimeError(f"no whole answer: {error} {self._head!r}"))


async def run(plan: Plan, requests: list[list[bytes]]) -> dict[str, object]:
    gaps: array[float] = array("d")
    done: list[list[float]] = []
    loop = asyncio.get_running_loop()

    async def ask(request: bytes) -> list[float]:
        stream = _Stream(request, gaps)
        await loop.create_connection(lambda: stream, "127.0.0.1", plan.port)
        await stream.ended
        return [stream.start, stream.first, stream.last, stream.num_events]

    async def client(own: list[bytes]) -> None:
        for request in own:
            done.append(await ask(request))

    start, cpu = time.monotonic(), time.process_time()
    await asyncio.gather(*map(client, requests))
    return {
        "requests": done,
        "gaps": gaps.tolist(),
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.monotonic() - start,
    }


def main() -> None:
    plan = Plan.of(sys.stdin.readline())
    requests = [[http_request(request, plan) for request in own] for own in plan.clients]
    print("ready", flush=True)
    if sys.stdin.readline():  # else who started it is gone
        print(json.dumps(asyncio.run(run(plan, requests))), flush=True)


if __name__ == "__main__":
    main()
