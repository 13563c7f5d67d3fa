"""A running server as commands talk to it, and `vllm complete`."""

import argparse
import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

from vllm import envs
from vllm.errors import ConfigError
from vllm.utils.http_client import HttpClient

_READ_TIMEOUT_S = 600.0


def add_parser(subparsers: Any) -> None:
    complete = subparsers.add_parser(
        "complete", description="Let a running server continue texts; an empty line or Ctrl-D ends."
    )
    add_flags(complete, "Continue this one text and print it.")
    complete.set_defaults(run=run_complete)


def add_flags(parser: argparse.ArgumentParser, quick_help: str) -> None:
    flag = parser.add_argument
    flag("--url", default="http://localhost:8000/v1",
         help="URL of the API (default: http://localhost:8000/v1).")  # fmt: skip
    flag("--model-name", help="Model name; default: the first that the server lists.")
    flag("--api-key", help="API key; default: VLLM_API_KEY.")
    flag("--max-tokens", type=int, help="Maximum tokens of an answer.")
    flag("--temperature", type=float, help="Sampling temperature; 0 is greedy.")
    flag("-q", "--quick", metavar="TEXT", help=quick_help)


def run_complete(args: argparse.Namespace) -> None:
    server = Server(args.url, args.api_key)
    fields = request_fields(args, server)
    for text in inputs(args.quick):
        server.show("/completions", {**fields, "prompt": text}, lambda choice: choice["text"])


def request_fields(args: argparse.Namespace, server: "Server") -> dict[str, Any]:
    """What every streamed request has."""
    fields: dict[str, Any] = {"model": args.model_name or server.first_model(), "stream": True}
    for name in ("max_tokens", "temperature"):
        if getattr(args, name) is not None:
            fields[name] = getattr(args, name)
    return fields


def inputs(quick: str | None) -> Iterator[str]:
    """The texts the user enters, or `quick` alone."""
    if quick is not None:
        yield quick
        return
    while True:
        try:
            text = input("> ").encode(errors="replace").decode()  # what was no UTF-8 is no text
        except EOFError:
            return
        if not text:
            return
        yield text


class Server:
    """The API at `url`: http where it names no scheme, /v1 where it names no path.

    An event loop runs during a request only: at the prompt, Ctrl-C interrupts at once. url: with
    scheme and path.
    """

    def __init__(self, url: str, api_key: str | None):
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(
                f"--url {url!r}: it takes an address such as http://localhost:8000/v1"
            )
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"
        self._api_key = api_key or envs.VLLM_API_KEY

    def first_model(self) -> str:
        async def ask() -> str:
            async with self.client() as client:
                return await client.first_model("/models")

        return asyncio.run(ask())

    def models(self) -> list[str]:
        """All that the server lists."""

        async def ask() -> list[str]:
            async with self.client() as client:
                listed = await client.get_json("/models")
                return [str(model["id"]) for model in listed["data"]]

        return asyncio.run(ask())

    def show(
        self, path: str, body: dict[str, Any], text_of: Callable[[dict[str, Any]], str | None]
    ) -> str:
        """Prints a streamed answer as it arrives, and returns it. text_of: of a choice."""

        async def ask() -> str:
            answer = ""
            async with self.client() as client, aclosing(client.post_events(path, body)) as events:
                async for event in events:
                    for choice in event["choices"]:
                        text = text_of(choice) or ""
                        print(text, end="", flush=True)
                        answer += text
            print()
            return answer

        return asyncio.run(ask())

    def client(self) -> HttpClient:
        return HttpClient(self.url, self._api_key, _READ_TIMEOUT_S, uses_proxy=True)
