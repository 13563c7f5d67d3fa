"""Messages between the process that started the engines and API processes (msgspec over ZMQ)."""

from typing import Any

import msgspec

from vllm import errors
from vllm.engine.metrics_sum import Family
from vllm.engine.process import Call, Failed


class ServerState(msgspec.Struct, tag="state", frozen=True):
    """What an API process must know of the engines; sent whole whenever it changes.

    addresses: of the engines by rank, [] while none serves. trouble, restart_reason, dead_reason:
    why requests are not answered, "" where that is not the case; seconds_to_ready: while engines
    are started again. num_stops: signals to stop: 0, 1 to finish running requests, 2 to stop now.
    """

    addresses: list[str]
    is_lockstep: bool
    max_model_len: int
    trouble: str
    restart_reason: str
    seconds_to_ready: int
    dead_reason: str
    is_asleep: bool
    num_stops: int = 0


class Poll(msgspec.Struct, tag="poll"):
    """Asks for a Report of the same number."""

    number: int


class Answer(msgspec.Struct, tag="answer"):
    """To a Call of the same number. kind: class of the error that it raised, "" for none;
    arguments: of that class."""

    number: int
    value: Any = None
    kind: str = ""
    arguments: list[Any] = []

    @classmethod
    def of_error(cls, number: int, error: errors.VllmError) -> "Answer":
        delay = getattr(error, "retry_after_s", None)
        given = [str(error)] if delay is None else [str(error), delay]
        return cls(number, kind=type(error).__name__, arguments=given)

    def error(self) -> errors.VllmError | None:
        if not self.kind:
            return None
        error: errors.VllmError = getattr(errors, self.kind, errors.VllmError)(*self.arguments)
        return error


class Hello(msgspec.Struct, tag="hello"):
    """An API process has started; it asks for the state."""


class Serving(msgspec.Struct, tag="serving"):
    """An API process answers requests."""


class Report(msgspec.Struct, tag="report"):
    """families: metrics. num_unfinished: sequences by rank of the engine. num_active: requests that
    are being answered."""

    number: int
    families: list[Family]
    num_unfinished: list[int]
    num_active: int


ToClient = ServerState | Poll | Answer
FromClient = Hello | Serving | Call | Report | Failed
