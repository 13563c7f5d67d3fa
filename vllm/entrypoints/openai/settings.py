"""Settings of the HTTP server."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ServerSettings:
    """Flags of `vllm serve` under their own names: all that do not concern the engine.

    api_server_count: processes that answer HTTP. chat_template: Jinja text. max_waiting: sequences;
    0 for no limit. request_timeout: seconds that a request may take; None for any.
    max_request_bytes: None for the defaults of each path.
    otlp_traces_endpoint: URL that traces are sent to; None for none.
    shutdown_timeout in seconds: what running requests get to finish after SIGTERM. dead_after in
    seconds, restarts within an hour: of engines (`vllm.engine.supervision.Supervision`). The
    allowed_* are those of CORS, which is off without origins.
    """

    api_server_count: int
    api_key: tuple[str, ...]
    protect_metrics: bool
    chat_template: str | None
    trust_request_chat_template: bool
    default_chat_template_kwargs: dict[str, Any]
    generation_config: str
    override_generation_config: dict[str, Any]
    enable_force_include_usage: bool
    ui: bool
    disable_fastapi_docs: bool
    tool_call_parser: str | None
    tool_parser_plugin: str | None
    reasoning_parser: str | None
    response_role: str
    max_waiting: int
    request_timeout: float | None
    max_request_bytes: int | None
    shutdown_timeout: float
    dead_after: float
    restarts: int
    allowed_origins: tuple[str, ...]
    allowed_methods: tuple[str, ...]
    allowed_headers: tuple[str, ...]
    allow_credentials: bool
    root_path: str
    ssl_keyfile: str | None
    ssl_certfile: str | None
    ssl_ca_certs: str | None
    ssl_cert_reqs: int
    ssl_ciphers: str | None
    uvicorn_log_level: str
    disable_log_requests: bool
    otlp_traces_endpoint: str | None
    strict_requests: bool
    enable_tokenizer_info_endpoint: bool
