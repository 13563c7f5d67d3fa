"""Endpoints of operators: load, settings, the engine's caches, sleep and profile."""

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response

from vllm import envs
from vllm.entrypoints.openai.errors import ApiError
from vllm.entrypoints.openai.generation import Service, json_response
from vllm.entrypoints.openai.http import Gate
from vllm.entrypoints.openai.settings import ServerSettings
from vllm.version import __version__

POOLING_PATHS = (
    "/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank",
    "/v2/rerank",
)  # fmt: skip
_LEVELS = ("0", "1", "2")


def add_management_paths(
    app: FastAPI, service: Service, gate: Gate, settings: ServerSettings
) -> None:
    @app.get("/load")
    async def load() -> Response:
        """Requests being answered, this one not counted."""
        return json_response({"server_load": await service.engine.server_load(gate.num_active) - 1})

    async def tokenizer_info() -> Response:
        return json_response(_tokenizer_info(service))

    has_info = settings.enable_tokenizer_info_endpoint
    _add(
        app, "GET", "/tokenizer_info", tokenizer_info, has_info, "--enable-tokenizer-info-endpoint"
    )
    _add_pooling_paths(app, service)
    _add_development_paths(app, service)


def _add(
    app: FastAPI,
    method: str,
    path: str,
    answer: Callable[..., Awaitable[Response]],
    is_served: bool,
    switch: str,
) -> None:
    """switch: what the server must be started with to serve `path`."""

    async def absent() -> Response:
        raise ApiError(404, f"{path} is served by a server started with {switch}", code="not_found")

    app.api_route(path, methods=[method])(answer if is_served else absent)


def _add_pooling_paths(app: FastAPI, service: Service) -> None:
    async def refused() -> Response:
        name = service.model_names[0]
        raise ApiError(
            400,
            f"{name} is not a pooling model: it generates text (/v1/chat/completions, "
            f"/v1/completions) and gives no vectors or scores",
            "model",
        )

    for path in POOLING_PATHS:
        app.post(path)(refused)


def _add_development_paths(app: FastAPI, service: Service) -> None:
    """For whoever may stop the server: anybody else could stall it with them."""
    engine = service.engine

    async def server_info(request: Request) -> Response:
        config = engine.vllm_config
        if request.query_params.get("config_format", "text") == "json":
            shown: Any = _plain(config)
        else:
            shown = str(config)
        return json_response({"vllm_config": shown, "version": __version__})

    async def reset_prefix_cache() -> Response:
        if not await engine.reset_prefix_cache():
            raise ApiError(503, "the prefix cache cannot be reset now; try again")
        return Response()

    async def sleep(request: Request) -> Response:
        level = request.query_params.get("level", "1")
        if level not in _LEVELS:
            raise ApiError(400, f"level takes {', '.join(_LEVELS)}, not {level:.20}", "level")
        await engine.sleep(int(level))
        return Response()

    async def wake_up(request: Request) -> Response:
        await engine.wake_up(request.query_params.getlist("tags") or None)
        return Response()

    async def is_sleeping() -> Response:
        return json_response({"is_sleeping": await engine.is_sleeping()})

    async def start_profile() -> Response:
        await engine.start_profile()
        return Response()

    async def stop_profile() -> Response:
        await engine.stop_profile()
        return Response()

    is_served, switch = envs.VLLM_SERVER_DEV_MODE, "VLLM_SERVER_DEV_MODE=1"
    for get in (server_info, is_sleeping):
        _add(app, "GET", f"/{get.__name__}", get, is_served, switch)
    for post in (reset_prefix_cache, sleep, wake_up):
        _add(app, "POST", f"/{post.__name__}", post, is_served, switch)
    has_folder = is_served or envs.VLLM_TORCH_PROFILER_DIR is not None
    for post in (start_profile, stop_profile):
        _add(app, "POST", f"/{post.__name__}", post, has_folder, "VLLM_TORCH_PROFILER_DIR=FOLDER")


def _plain(value: Any) -> Any:
    """Config values as JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _tokenizer_info(service: Service) -> dict[str, Any]:
    tokenizer = service.prompts.tokenizer
    if tokenizer is None:
        raise ApiError(404, "this server has no tokenizer (--skip-tokenizer-init)")
    own = {key: _plain(value) for key, value in tokenizer.init_kwargs.items()}
    template = service.prompts.chat_template or tokenizer.chat_template
    return {**own, "tokenizer_class": type(tokenizer).__name__, "chat_template": template}
