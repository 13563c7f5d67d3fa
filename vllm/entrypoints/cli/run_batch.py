"""`vllm run-batch`: answers a file of requests, in the form of OpenAI's batches, without a server.

Each line of the input is {"custom_id", "method": "POST", "url": a path of the API, "body"}; each of
the output {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}, in the
order of the input. A request that is refused has the status and body that a server would send.
"""

import argparse
import asyncio
import json
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.serve import add_server_flags, server_settings
from vllm.entrypoints.openai.settings import ServerSettings
from vllm.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

Json = dict[str, Any]


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "run-batch",
        description="Answer the requests of a file in the form of OpenAI's batches, and write the "
        "answers to another, in the same order. Takes the flags of vllm serve.",
    )
    flag = parser.add_argument
    flag("-i", "--input-file", required=True, type=Path, help="JSON Lines with requests.")
    flag("-o", "--output-file", required=True, type=Path, help="JSON Lines with answers.")
    flag("--model", required=True, help="Folder or hub name.")
    add_server_flags(parser.add_argument_group("server"))
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answers all lines; 1 where one of them was refused."""
    lines = list(_lines(args.input_file))
    # The lines of the file wait here, not in a queue.
    settings = replace(server_settings(args), max_waiting=0)
    with _opened(args.output_file) as output:
        answers = asyncio.run(_answered(EngineArgs.from_cli_args(args), settings, lines))
        output.writelines(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers)
    refused = sum(answer["response"]["status_code"] != 200 for answer in answers)
    print(f"{len(answers)} requests answered, {refused} of them refused: {args.output_file}")
    return int(refused > 0)


def _lines(file: Path) -> Iterator[Json]:
    """ConfigError names the line that is no request."""
    try:
        texts = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--input-file {file}: {error}") from error
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{file}, line {number}: {error}") from error
        fields = {"custom_id": str, "url": str, "body": dict}
        wrong = [k for k, kind in fields.items() if not isinstance(line, dict)
                 or not isinstance(line.get(k), kind)]  # fmt: skip
        if wrong or line.get("method", "POST") != "POST":
            raise ConfigError(
                f'{file}, line {number}: it takes {{"custom_id", "method": "POST", "url", "body"}}'
                f"; wrong or missing: {', '.join(wrong) or 'method'}"
            )
        yield line


def _opened(file: Path) -> Any:
    try:
        return file.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output-file {file}: {error}") from error


async def _answered(args: EngineArgs, settings: ServerSettings, lines: list[Json]) -> list[Json]:
    from vllm.engine.async_llm import AsyncLLM
    from vllm.utils.import_utils import hide_torch

    hide_torch()
    engine = AsyncLLM(args)
    try:
        from vllm.entrypoints.openai.api_server import build_app
        from vllm.entrypoints.openai.http import Gate
        from vllm.entrypoints.openai.server import make_service

        app = build_app(
            make_service(engine, settings), Gate(refusal=None), engine.metrics, settings
        )
        await engine.wait_ready()
        # Twice what runs, so that the engine never waits for a request.
        room = asyncio.Semaphore(2 * engine.vllm_config.scheduler_config.max_num_seqs)

        async def answer(line: Json) -> Json:
            async with room:
                return await _answer(app, line)

        return await asyncio.gather(*map(answer, lines))
    finally:
        await engine.shutdown()


async def _answer(app: "ASGIApp", line: Json) -> Json:
    if line["body"].get("stream"):
        error = {"message": "a batch has no streams: leave stream out", "param": "stream"}
        return _result(line, 400, {"error": error})
    status, content = await _post(app, line["url"], json.dumps(line["body"]).encode())
    return _result(line, status, json.loads(content))


def _result(line: Json, status: int, body: Json) -> Json:
    response = {"status_code": status, "request_id": f"batch-req-{uuid4().hex}", "body": body}
    return {"id": f"vllm-{uuid4().hex}", "custom_id": line["custom_id"], "response": response,
            "error": None}  # fmt: skip


async def _post(app: "ASGIApp", path: str, body: bytes) -> tuple[int, bytes]:
    """Calls the application as a web server would; its status and content."""
    scope: MutableMapping[str, Any] = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "headers": [(b"content-type", b"application/json")],
        "client": None, "server": None,
    }  # fmt: skip
    status, pieces = 0, list[bytes]()
    is_sent = False

    async def receive() -> Mapping[str, Any]:
        nonlocal is_sent
        if is_sent:
            await asyncio.Event().wait()  # the client stays
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Mapping[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        pieces.append(message.get("body", b""))

    await app(scope, receive, send)  # type: ignore[arg-type]
    return status, b"".join(pieces)
