"""HTTP as uvicorn has it. h11 bounds the head of a request by itself; httptools, which uvicorn
takes where it is installed, does not."""

from typing import Any

from starlette.types import Send

MAX_HEAD_BYTES = 64 << 10


def http_protocol() -> Any:
    """What uvicorn's `http` takes."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class BoundedHead(HttpToolsProtocol):
        """Closes connections of which MAX_HEAD_BYTES made neither the end of a head nor a body."""

        _num_bytes = 0

        def data_received(self, data: bytes) -> None:
            self._num_bytes += len(data)
            super().data_received(data)
            if self._num_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The head has more than {MAX_HEAD_BYTES} bytes.")

        def on_headers_complete(self) -> None:
            self._num_bytes = 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._num_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._num_bytes = 0
            super().on_message_complete()

    return BoundedHead


class Connection:
    """Writes parts of the body of a response that has begun, without waiting: past uvicorn's `send`
    and the state machine of h11, which take longer than the system call does.

    cycle: uvicorn's, of a response in chunks.
    """

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: Any):
        self._cycle, self._flow, self._write = cycle, cycle.flow, cycle.transport.write

    @classmethod
    def of(cls, send: Send) -> "Connection | None":
        """send: of the server; None where it is not uvicorn's, or the response has no chunks."""
        cycle: Any = getattr(send, "__self__", None)
        if type(cycle).__module__ not in _CYCLES:
            return None
        scope = cycle.scope
        is_chunked = scope["http_version"] == "1.1" and scope["method"] != "HEAD"
        return cls(cycle) if is_chunked else None

    @property
    def is_ready(self) -> bool:
        """Whether the client is there and has taken what was written before, but for 64 KiB."""
        return not self._flow.write_paused and not self._cycle.disconnected

    def write(self, part: bytes) -> None:
        """part: not empty."""
        self._write(b"%x\r\n%b\r\n" % (len(part), part))


_CYCLES = ("uvicorn.protocols.http.h11_impl", "uvicorn.protocols.http.httptools_impl")
