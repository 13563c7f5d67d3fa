"""Who listens on a TCP port of this machine, and which port is free. tools/set_up.py asks it too,
before anything is installed."""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_LISTEN = "0A"
_NUM_TRIED = 1000


def listener_of(port: int) -> str:
    """`python3 (process 123)`; "" where nobody listens, or Linux does not show whose socket it is:
    those of other users are seen by root alone."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for folder in _PROC.glob("[0-9]*") if sockets else ():
        with suppress(OSError):
            if any(os.readlink(entry) in sockets for entry in (folder / "fd").iterdir()):
                return f"{(folder / 'comm').read_text().strip()} (process {folder.name})"
    return ""


def _listening(port: int) -> Iterator[str]:
    """Inodes of the sockets that listen on the port, of either version of IP."""
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (_PROC / "net" / name).read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                    yield rest[5]


def is_free(host: str, port: int) -> bool:
    """Whether a server can listen there now."""
    with suppress(OSError, OverflowError):
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM,
                                   flags=socket.AI_PASSIVE)[0]  # fmt: skip
        with socket.socket(*found[:3]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(found[4])
            probe.listen(1)
            return True
    return False


def next_free(host: str, port: int) -> int | None:
    """The first free port above `port`."""
    above = range(port + 1, min(port + _NUM_TRIED, 65535) + 1)
    return next((other for other in above if is_free(host, other)), None)


def taken_text(host: str, port: int, flag: str) -> str:
    """`port 8000 is taken by python3 (process 123); 8001 is free: --port 8001`. flag: what the next
    free port is given with."""
    owner, other = listener_of(port), next_free(host, port)
    by = f" by {owner}" if owner else " by another program"
    offer = f"; {other} is free: {flag}{other}" if other else ""
    return f"port {port} is taken{by}{offer}"
