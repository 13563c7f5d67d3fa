"""The whole application without an engine, for requests that need none."""

from types import SimpleNamespace
from typing import Any

from vllm.engine.metrics import Metrics
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.openai.http import Gate
from vllm.entrypoints.openai.settings import ServerSettings


def bare_app(gate: Gate | None = None, **settings: Any) -> Any:
    """settings: beside the defaults, of ServerSettings. gate: by default open, without keys."""
    made = ServerSettings(**{
        **dict.fromkeys(ServerSettings.__dataclass_fields__),
        "max_request_bytes": 1 << 20, "root_path": "", "disable_log_requests": True,
        "allowed_origins": ("*",), "allowed_methods": ("*",), "allowed_headers": ("*",),
        "allow_credentials": False, "ui": True, **settings,
    })  # fmt: skip
    service: Any = SimpleNamespace(model_names=("m",), engine=None)
    return build_app(service, gate or Gate(refusal=None), Metrics("m", 64), made)
