"""The parser of HTTP. h11 bounds the head of a request by itself; httptools, which uvicorn takes
where it is installed, does not."""

from typing import Any

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
