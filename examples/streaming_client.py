"""Shows an answer of a running server as it is generated, with the standard library alone.

    vllm serve
    python examples/streaming_client.py [URL] [QUESTION]

URL: of the server, http://localhost:8000 without it.
"""

import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any


def events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Of a stream of server-sent events: `data: {...}` lines, the last one `data: [DONE]`."""
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        for line in response:
            text = line.decode().removeprefix("data: ").strip()
            if text and text != "[DONE]":
                yield json.loads(text)


def main(server: str, question: str) -> None:
    start = time.monotonic()
    first = None
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 64}
    for event in events(f"{server}/v1/chat/completions", body):
        for choice in event["choices"]:
            if piece := choice["delta"].get("content"):
                first = first or time.monotonic()
                print(piece, end="", flush=True)
        if usage := event.get("usage"):  # the last event
            wait, decode = (first or start) - start, time.monotonic() - (first or start)
            num_tokens = usage["completion_tokens"]
            print(f"\n({num_tokens} tokens, the first after {wait:.2f} s, then {decode:.2f} s)")


if __name__ == "__main__":
    given = sys.argv[1:]
    main(
        given[0].rstrip("/") if given else "http://localhost:8000",
        " ".join(given[1:]) or "Why is the sky blue?",
    )
