"""Errors as OpenAI's clients expect them: a status, `{"error": {message, type, param, code}}`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import Response
from pydantic import BaseModel, ValidationError

from vllm.entrypoints.openai.anthropic_errors import ANTHROPIC_PATH, anthropic_error
from vllm.errors import (
    EngineDeadError,
    NoMemoryError,
    NumericsError,
    QueueFullError,
    RequestError,
    RestartingError,
    StoppingError,
    VllmError,
    did_you_mean,
)
from vllm.logger import get_logger

logger = get_logger(__name__)

_MAX_GIVEN_CHARS = 80
MAX_MESSAGE_CHARS = 2000
# By pydantic's type of error, where its own words do not fit.
_ACCEPTED = {
    "too_short": "takes at least 1 item",
    "too_long": "must be empty",
    "model_type": "should be an object",
}


@dataclass
class ApiError(Exception):
    """An error response. `code`: OpenAI's error code, where there is one."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # What a message quotes comes from clients.
        if len(self.message) > MAX_MESSAGE_CHARS:
            self.message = self.message[: MAX_MESSAGE_CHARS - 3] + "..."

    def body(self) -> dict[str, Any]:
        type_ = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            type_ = "rate_limit_error"
        error = {"message": self.message, "type": type_, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self, path: str = "") -> Response:
        """In the form of the API that `path` belongs to."""
        is_anthropic = path.startswith(ANTHROPIC_PATH)
        body = anthropic_error(self.status, self.message) if is_anthropic else self.body()
        content = msgspec.json.encode(body)
        return Response(content, self.status, dict(self.headers), "application/json")


def as_api_error(error: Exception) -> ApiError:
    """The response for `error`; an unexpected error is logged and becomes a 500."""
    match error:
        case ApiError():
            return error
        case NumericsError():
            return ApiError(500, str(error), code="numerics")
        case NoMemoryError():
            headers = {"Retry-After": "1"}
            return ApiError(503, str(error), code="out_of_memory", headers=headers)
        case RequestError():
            return ApiError(400, str(error), error.param)
        case QueueFullError():
            headers = {"Retry-After": str(error.retry_after_s)}
            return ApiError(429, str(error), code="queue_full", headers=headers)
        case RestartingError():
            headers = {"Retry-After": str(error.retry_after_s)}
            return ApiError(503, str(error), code="unavailable", headers=headers)
        case StoppingError():
            return ApiError(503, str(error), code="unavailable", headers={"Retry-After": "1"})
        case EngineDeadError():
            return ApiError(500, str(error), code="engine_dead")
        case VllmError():
            return ApiError(400, str(error))
    logger.error("a request failed unexpectedly", exc_info=error)
    message = f"internal error ({type(error).__name__}); the server's log has the details"
    return ApiError(500, message)


def status_error(status: int, method: str, path: str) -> ApiError:
    """The error for a routing status: unknown path, or method not allowed."""
    if status == HTTPStatus.NOT_FOUND:
        return ApiError(404, f"no such path: {path:.200}", code="not_found")
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        return ApiError(405, f"{path} does not take {method}", code="method_not_allowed")
    return ApiError(status, HTTPStatus(status).phrase)


def invalid_fields(
    error: ValidationError, model: type[BaseModel], at: tuple[str | int, ...] = ()
) -> ApiError:
    """One sentence per wrong field: its name, what is accepted, what was given. at: where in the
    request the fields of `model` are."""
    problems = error.errors(include_url=False, include_context=False)
    shown = [_sentence(dict(problem), model, at) for problem in problems[:5]]
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown)} more")
    first = (*at, *problems[0]["loc"])
    return ApiError(400, "; ".join(shown), str(first[0]) if first else None)


def _sentence(
    problem: dict[str, Any], model: type[BaseModel], at: tuple[str | int, ...] = ()
) -> str:
    name = ".".join(map(str, (*at, *problem["loc"]))) or "the body"
    if problem["type"] == "missing":
        return f"{name} is missing"
    if problem["type"] == "extra_forbidden":
        return unknown_field(problem["loc"], model)
    told = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{name} {_ACCEPTED.get(problem['type'], told)}, not {_shorten(problem['input'])}"


def unknown_field(location: tuple[str | int, ...], model: type[BaseModel]) -> str:
    """What to say of a field that `model` does not have."""
    known = _fields_at(model, location[:-1])
    name = ".".join(map(str, location))
    wanted = str(location[-1])
    return f"unknown field {name}" + (did_you_mean(wanted, known) if len(wanted) < 100 else "")


def _fields_at(model: type[BaseModel], location: tuple[str | int, ...]) -> list[str]:
    """Names of the fields accepted at `location`, which may lead into nested models."""
    for part in location:
        if part in model.model_fields:
            inner = _types_in(model.model_fields[str(part)].annotation)
            if not inner:
                return []
            model = inner[0]
    return [f.alias or name for name, f in model.model_fields.items()]


def _types_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for arg in getattr(annotation, "__args__", ()) for found in _types_in(arg)]


def _shorten(value: Any) -> str:
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError):
        text = repr(type(value).__name__)
    return text if len(text) <= _MAX_GIVEN_CHARS else text[: _MAX_GIVEN_CHARS - 3] + "..."
