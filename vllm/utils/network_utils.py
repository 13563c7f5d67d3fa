"""Names and addresses that nobody else uses."""

import socket
from uuid import uuid4


def random_uuid() -> str:
    """128 random bits as 32 hexadecimal digits."""
    return uuid4().hex


def get_open_port() -> int:
    """A TCP port that was free on this machine a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
