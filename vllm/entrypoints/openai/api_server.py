"""The HTTP application: routes and their handlers. As a program it is `vllm serve`."""

import os
import sys

if __name__ == "__main__":  # before the web framework is imported, here or in the engine's process
    os.execv(sys.executable, [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve",
                              *sys.argv[1:]])  # fmt: skip

from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from vllm.engine.metrics import CONTENT_TYPE, Metrics
from vllm.entrypoints.demo import DEMO_NAME, DEMO_ORIGIN
from vllm.entrypoints.openai.anthropic_messages import count_message_tokens, create_message
from vllm.entrypoints.openai.anthropic_protocol import CountTokensRequest, MessagesRequest
from vllm.entrypoints.openai.bodies import BodyReader
from vllm.entrypoints.openai.caller import Caller
from vllm.entrypoints.openai.chat import create_chat_completion
from vllm.entrypoints.openai.completions import create_completion
from vllm.entrypoints.openai.descriptions import describe_paths
from vllm.entrypoints.openai.errors import ApiError, as_api_error, status_error
from vllm.entrypoints.openai.field_policy import (
    ignored_fields,
    read_request,
    validated,
    warning_header,
)
from vllm.entrypoints.openai.generation import Service, json_response
from vllm.entrypoints.openai.http import (
    Gate,
    GateMiddleware,
    given_request_id,
    prefers_html,
    until_disconnect,
)
from vllm.entrypoints.openai.management import add_management_paths
from vllm.entrypoints.openai.pages import add_pages
from vllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from vllm.entrypoints.openai.responses import (
    cancel_response,
    count_input_tokens,
    create_response,
    input_items,
)
from vllm.entrypoints.openai.responses_protocol import ResponsesRequest
from vllm.entrypoints.openai.settings import ServerSettings
from vllm.entrypoints.openai.translated import TranslatedRequest
from vllm.errors import RequestError, VllmError
from vllm.kernels.report.html_report import html_page
from vllm.kernels.report.json_report import parse_report
from vllm.logger import request_id as logged_request_id
from vllm.version import __version__

Body = TypeVar("Body", bound=BaseModel)
Generation = TypeVar("Generation", bound=GenerationRequest | TranslatedRequest)


def build_app(service: Service, gate: Gate, metrics: Metrics, settings: ServerSettings) -> ASGIApp:
    """The whole application, middleware included."""
    schema_path = None if settings.disable_fastapi_docs else "/openapi.json"
    # FastAPI's own pages load their scripts from the network.
    app = FastAPI(
        title="vLLM", version=__version__, openapi_url=schema_path, docs_url=None, redoc_url=None
    )
    add_pages(app, settings)
    _add_status_paths(app, service, gate)
    _add_model_paths(app, service)
    bodies = BodyReader(settings.max_request_bytes)
    _add_generation_paths(app, service, gate, metrics, settings, bodies)
    _add_response_paths(app, service)
    _add_tokenizer_paths(app, service, settings, bodies)
    add_management_paths(app, service, gate, settings)
    describe_paths(app, service.model_names[0])
    _add_error_handlers(app)
    paths = frozenset(str(getattr(route, "path", "")) for route in app.routes)
    root_path = settings.root_path.rstrip("/")
    logs_requests = not settings.disable_log_requests
    gated = GateMiddleware(app, gate, metrics, paths, root_path, logs_requests)
    if not settings.allowed_origins:
        return gated
    return CORSMiddleware(
        gated,
        allow_origins=settings.allowed_origins,
        allow_methods=settings.allowed_methods,
        allow_headers=settings.allowed_headers,
        allow_credentials=settings.allow_credentials,
        expose_headers=["X-Request-Id", "Warning"],
    )


def _add_status_paths(app: FastAPI, service: Service, gate: Gate) -> None:
    async def health() -> Response:
        """200 while requests are answered, else 503 with the reason."""
        reason = service.engine.trouble or gate.refusal
        if reason is None:
            return Response()
        return ApiError(503, reason, code="unavailable").response()

    async def live() -> Response:
        """200 while this process answers and its engines run, load or are started again: what a
        restart of the server could heal is a 503."""
        if service.engine.is_dead:
            return ApiError(503, service.engine.dead_reason, code="engine_dead").response()
        return Response()

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(await service.engine.render_metrics(), media_type=CONTENT_TYPE)

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @app.get("/kernels")
    async def kernels(request: Request) -> Response:
        """The kernel decisions in force, with every candidate and the reasons against it: a page
        for a browser (`Accept: text/html` first), else JSON."""
        content = await service.engine.kernels()
        if prefers_html(request.headers.getlist("accept")):
            page = html_page(parse_report(content, "/kernels"), service.model_names[0])
            return HTMLResponse(page, headers={"Vary": "Accept"})
        response = json_response(content)
        response.headers["Vary"] = "Accept"
        return response

    app.api_route("/health", methods=["GET", "HEAD"], include_in_schema=False)(health)
    app.api_route("/live", methods=["GET", "HEAD"], include_in_schema=False)(live)
    app.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)(health)


def _add_model_paths(app: FastAPI, service: Service) -> None:
    def card(name: str) -> dict[str, object]:
        folder = service.engine.model_config.model
        origin = {"description": DEMO_ORIGIN} if Path(folder).name == DEMO_NAME else {}
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "vllm",
            "root": folder,
            "max_model_len": service.max_model_len,
            **origin,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [card(n) for n in service.model_names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return json_response(card(name))


def _add_generation_paths(
    app: FastAPI,
    service: Service,
    gate: Gate,
    metrics: Metrics,
    settings: ServerSettings,
    bodies: BodyReader,
) -> None:
    def add(
        path: str,
        kind: type[Generation],
        create: Callable[[Service, Generation, str], Coroutine[Any, Any, Response]],
    ) -> None:
        read = partial(read_request, kind, is_strict=settings.strict_requests)

        async def endpoint(request: Request) -> Response:
            caller = Caller.of(request.scope, gate.client(request.scope), settings.request_timeout)
            body, left_out = await bodies.read(request, read)
            for name in left_out:
                metrics.record_ignored_field(name if name in ignored_fields(kind) else "other")
            service.check_model(body.model)
            body.check()
            own_id = getattr(body, "request_id", None)
            if own_id is not None and not given_request_id(request.scope):
                request.state.request_id = own_id
                logged_request_id.set(own_id)
            own = replace(service, caller=caller)
            work = create(own, body, request.state.request_id)
            response = await until_disconnect(request.receive, work)
            if texts := [*left_out.values(), *getattr(body, "warnings", ())]:
                response.headers["Warning"] = warning_header(texts)
            return response

        app.post(path, openapi_extra=_described(kind))(endpoint)

    add("/v1/completions", CompletionRequest, create_completion)
    add("/v1/chat/completions", ChatCompletionRequest, create_chat_completion)
    add("/v1/responses", ResponsesRequest, create_response)
    add("/v1/responses/input_tokens", ResponsesRequest, count_input_tokens)
    add("/v1/messages", MessagesRequest, create_message)
    add("/v1/messages/count_tokens", CountTokensRequest, count_message_tokens)


def _add_response_paths(app: FastAPI, service: Service) -> None:
    path = "/v1/responses/{response_id}"

    @app.get(path)
    async def retrieve(request: Request, response_id: str) -> Response:
        body = (await service.responses.get(response_id)).body
        if request.query_params.get("stream", "false").lower() not in ("false", "0", ""):
            raise RequestError("stream is not supported of a stored response", "stream")
        return Response(body, media_type="application/json")

    @app.delete(path)
    async def delete(response_id: str) -> Response:
        await service.responses.delete(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @app.post(f"{path}/cancel")
    async def cancel(response_id: str) -> Response:
        return await cancel_response(service, response_id)

    @app.get(f"{path}/input_items")
    async def items(request: Request, response_id: str) -> Response:
        stored = await service.responses.get(response_id)
        return json_response(input_items(stored, response_id, request.query_params))


def _add_tokenizer_paths(
    app: FastAPI, service: Service, settings: ServerSettings, bodies: BodyReader
) -> None:
    def read(kind: type[Body], fields: dict[str, Any]) -> Body:
        return validated(kind, fields, settings.strict_requests)

    def read_tokenize(fields: dict[str, Any]) -> TokenizeTextRequest | TokenizeChatRequest:
        if "messages" in fields:
            return read(TokenizeChatRequest, fields)
        return read(TokenizeTextRequest, fields)

    @app.post("/tokenize", openapi_extra=_described(TokenizeTextRequest, TokenizeChatRequest))
    async def tokenize(request: Request) -> Response:
        body = await bodies.read(request, read_tokenize)
        if isinstance(body, TokenizeChatRequest):
            body.check_template_fields()
            text = await service.prompts.render(body)
            adds_special_tokens = bool(body.add_special_tokens)
        else:
            text, adds_special_tokens = body.prompt, body.add_special_tokens is not False
        service.check_model(body.model)
        tokens = await service.prompts.encode(text, adds_special_tokens)
        answer: dict[str, object] = {
            "count": len(tokens),
            "max_model_len": service.max_model_len,
            "tokens": tokens,
        }
        if body.return_token_strs:
            answer["token_strs"] = await service.prompts.token_texts(tokens)
        return json_response(answer)

    @app.post("/detokenize", openapi_extra=_described(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        body = await bodies.read(request, partial(read, DetokenizeRequest))
        service.check_model(body.model)
        return json_response({"prompt": await service.prompts.decode(body.tokens)})


def _described(*kinds: type[BaseModel]) -> dict[str, object]:
    """The body's schema for /docs; FastAPI itself never sees the body."""
    schemas = [kind.model_json_schema() for kind in kinds]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _add_error_handlers(app: FastAPI) -> None:
    async def routing(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        return status_error(error.status_code, request.method, path).response(path)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    async def other(request: Request, error: Exception) -> Response:
        return as_api_error(error).response(request.url.path)

    app.add_exception_handler(HTTPException, routing)  # type: ignore[arg-type]
    app.add_exception_handler(ClientDisconnect, gone)
    for kind in (ApiError, VllmError, Exception):
        app.add_exception_handler(kind, other)
