"""Errors as Anthropic's clients expect them: `{"type": "error", "error": {type, message}}`."""

from typing import Any

ANTHROPIC_PATH = "/v1/messages"
"""Paths that begin so belong to Anthropic's API."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """The body of a response with `status`, or the data of an event of a stream."""
    other = "invalid_request_error" if status < 500 else "api_error"
    return {"type": "error", "error": {"type": _TYPES.get(status, other), "message": message}}
