"""`vllm chat` and `vllm complete`: talk to a running server from a terminal."""

import argparse
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from vllm import envs
from vllm.errors import ConfigError, VllmError

_TIMEOUT_S = 600.0


class ServerError(VllmError):
    """The server cannot be reached or refused the request."""


def add_parser(subparsers: Any) -> None:
    chat = subparsers.add_parser(
        "chat",
        help="Chat with a running server.",
        description="Chat with a running server; an empty line or Ctrl-D ends.",
    )
    _add_flags(chat, "Send this one message and print the answer.")
    chat.add_argument("--system-prompt", help="System message of the conversation.")
    chat.set_defaults(run=run_chat)
    complete = subparsers.add_parser(
        "complete",
        help="Let a running server continue texts.",
        description="Let a running server continue texts; an empty line or Ctrl-D ends.",
    )
    _add_flags(complete, "Continue this one text and print it.")
    complete.set_defaults(run=run_complete)


def _add_flags(parser: argparse.ArgumentParser, quick_help: str) -> None:
    parser.add_argument("--url", default="http://localhost:8000/v1",
                        help="URL of the API (default: http://localhost:8000/v1).")  # fmt: skip
    parser.add_argument(
        "--model-name", help="Model name; default: the first that the server lists."
    )
    parser.add_argument("--api-key", default=None, help="API key; default: VLLM_API_KEY.")
    parser.add_argument("--max-tokens", type=int, help="Maximum tokens of an answer.")
    parser.add_argument("--temperature", type=float, help="Sampling temperature; 0 is greedy.")
    parser.add_argument("-q", "--quick", metavar="TEXT", help=quick_help)


def run_chat(args: argparse.Namespace) -> None:
    api = Api(args.url, args.api_key)
    fields = _fields(args, api)
    messages = []
    if args.system_prompt is not None:
        messages.append({"role": "system", "content": args.system_prompt})
    for text in _inputs(args.quick):
        messages.append({"role": "user", "content": text})
        answer = ""
        for chunk in api.stream("/chat/completions", {**fields, "messages": messages}):
            for choice in chunk["choices"]:
                answer += _show(choice["delta"].get("content"))
        print()
        messages.append({"role": "assistant", "content": answer})


def run_complete(args: argparse.Namespace) -> None:
    api = Api(args.url, args.api_key)
    fields = _fields(args, api)
    for text in _inputs(args.quick):
        for chunk in api.stream("/completions", {**fields, "prompt": text}):
            for choice in chunk["choices"]:
                _show(choice["text"])
        print()


def _fields(args: argparse.Namespace, api: "Api") -> dict[str, Any]:
    fields: dict[str, Any] = {"model": args.model_name or api.first_model(), "stream": True}
    for name in ("max_tokens", "temperature"):
        if getattr(args, name) is not None:
            fields[name] = getattr(args, name)
    return fields


def _inputs(quick: str | None) -> Iterator[str]:
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


def _show(text: str | None) -> str:
    print(text or "", end="", flush=True)
    return text or ""


class Api:
    """An OpenAI-compatible server at `url`; http and /v1 where it names no scheme or no path."""

    def __init__(self, url: str, api_key: str | None):
        parts = urlsplit(url if "//" in url else f"http://{url}")
        path = parts.path.rstrip("/") or "/v1"
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(
                f"--url {url!r}: it takes an address such as http://localhost:8000/v1"
            )
        self._url = f"{parts.scheme}://{parts.netloc}{path}"
        self._headers = {"Content-Type": "application/json"}
        if key := api_key or envs.VLLM_API_KEY:
            self._headers["Authorization"] = f"Bearer {key}"

    def first_model(self) -> str:
        with self._open("/models", None) as response:
            try:
                return str(json.load(response)["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise ServerError(
                    f"{self._url}/models lists no model ({error!r}): is it the address of an "
                    f"OpenAI-compatible server? It takes one such as http://localhost:8000/v1"
                ) from error

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Chunks of a streamed answer; ServerError if it ends with an error."""
        with self._open(path, body) as response:
            for line in _lines(response, self._url):
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                if not data:
                    continue
                try:
                    chunk = json.loads(data)
                except ValueError as error:
                    raise ServerError(
                        f"{self._url} sends no events of JSON: {data!r:.80}"
                    ) from error
                if "error" in chunk:
                    raise ServerError(f"{self._url}: {chunk['error']['message']}")
                yield chunk
        raise ServerError(f"{self._url}: the answer ended early; see the server's log")

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self._url + path, data, self._headers)
            return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            raise ServerError(f"{self._url}: {_message_of(error)}") from error
        except (urllib.error.URLError, OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ServerError(
                f"no server answers at {self._url} ({reason}); start one with 'vllm serve' or "
                f"give its address with --url"
            ) from error


def _lines(response: Any, url: str) -> Iterator[bytes]:
    try:
        yield from response
    except (http.client.HTTPException, OSError) as error:
        raise ServerError(f"{url}: the answer broke off ({error}); see the server's log") from error


def _message_of(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code} {error.reason}"
