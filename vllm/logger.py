"""Loggers with one format: `INFO 11-21 21:02:33 [scheduler] text`."""

import logging
import sys

from vllm import envs
from vllm.utils.log_stream import LineHandler

_ROOT = "vllm"


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        record.module_name = record.name.rsplit(".", 1)[-1]
        return super().format(record)


def _configure() -> None:
    handler = LineHandler(sys.stderr)
    handler.setFormatter(
        _Formatter("%(levelname)s %(asctime)s [%(module_name)s] %(message)s", "%m-%d %H:%M:%S")
    )
    root = logging.getLogger(_ROOT)
    root.addHandler(handler)
    root.propagate = False
    root.setLevel(envs.VLLM_LOGGING_LEVEL.upper())


def get_logger(name: str) -> logging.Logger:
    """The logger of module `name`; the first call attaches the project's handler."""
    if not logging.getLogger(_ROOT).handlers:
        _configure()
    return logging.getLogger(name)


init_logger = get_logger
"""The name that plug-ins know."""
