"""What every process that answers HTTP needs."""

import sys
from typing import TYPE_CHECKING

from vllm.entrypoints.openai.settings import ServerSettings

if TYPE_CHECKING:
    from vllm.engine.engine_client import EngineClient
    from vllm.engine.request_traces import RequestTracer

BACKLOG = 2048
"""Connections that wait to be accepted."""

# How long a thread that parses or renders may keep the interpreter lock from the event loop, which
# needs it several times for each answer. Python's own 5 ms add up where several threads work.
_SWITCH_S = 0.0005


def prepare_process() -> None:
    from vllm.utils.import_utils import hide_torch

    hide_torch()
    sys.setswitchinterval(_SWITCH_S)


def tracer_of(engine: "EngineClient", settings: ServerSettings) -> "RequestTracer | None":
    """What sends traces of the engine's requests, where a collector is named."""
    if settings.otlp_traces_endpoint is None:
        return None
    from vllm.engine.request_traces import RequestTracer

    return RequestTracer(settings.otlp_traces_endpoint, engine.metrics.record_lost_traces)
