"""Loggers with one format: `INFO 11-21 21:02:33 [scheduler] text`, or a JSON object a line."""

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Any

from vllm import envs
from vllm.utils.log_stream import LineHandler

_ROOT = "vllm"

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Of the HTTP request that the current task answers: lines that are logged meanwhile carry it."""


def _request_of(record: logging.LogRecord) -> str | None:
    """`extra={"request_id": ...}` of a line counts before the task's."""
    found: str | None = getattr(record, "request_id", None) or request_id.get()
    return found


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        record.module_name = record.name.rsplit(".", 1)[-1]
        text, own = super().format(record), _request_of(record)
        return text if own is None or own in text else f"{text} [request {own}]"


class _JsonFormatter(logging.Formatter):
    """time: UTC. request_id, http and exception are there where they are known."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
        }
        extra = {"request_id": _request_of(record), "http": getattr(record, "http", None)}
        if record.exc_info:
            extra["exception"] = self.formatException(record.exc_info)
        return json.dumps(line | {name: value for name, value in extra.items() if value})


def _formatter() -> logging.Formatter:
    if envs.VLLM_LOG_FORMAT == "json":
        return _JsonFormatter()
    text = "%(levelname)s %(asctime)s [%(module_name)s] %(message)s"
    return _TextFormatter(text, "%m-%d %H:%M:%S")


def _configure() -> None:
    handler = LineHandler(sys.stderr)
    handler.setFormatter(_formatter())
    root = logging.getLogger(_ROOT)
    root.handlers = [handler]
    root.propagate = False
    root.setLevel(envs.VLLM_LOGGING_LEVEL.upper())
    if envs.VLLM_LOG_FORMAT == "json":  # what libraries say is on lines of its own too
        logging.getLogger().handlers = [handler]
        logging.captureWarnings(True)


def use_format(name: str) -> None:
    """`text` or `json`, for this process and those that it starts from now on."""
    envs.set_for_children("VLLM_LOG_FORMAT", name)
    if name == "json":
        envs.set_for_children("TQDM_DISABLE", "1")  # a bar is no line
    _configure()


def get_logger(name: str) -> logging.Logger:
    """The logger of module `name`; the first call attaches the project's handler."""
    if not logging.getLogger(_ROOT).handlers:
        _configure()
    return logging.getLogger(name)


init_logger = get_logger
"""The name that plug-ins know."""
