"""Settings of the HTTP server."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    """max_body_size in bytes; shutdown_timeout in seconds: what running requests get to finish
    after SIGTERM; chat_template: Jinja text. The allowed_* are those of CORS."""

    api_keys: tuple[str, ...] = ()
    chat_template: str | None = None
    trusts_request_templates: bool = False
    uses_model_defaults: bool = True
    response_role: str = "assistant"
    max_waiting: int | None = None
    max_body_size: int = 8 << 20
    shutdown_timeout: float = 120.0
    allowed_origins: tuple[str, ...] = ("*",)
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    uvicorn_log_level: str = "warning"
    logs_requests: bool = True
