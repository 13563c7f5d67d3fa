"""What systemd asks of a service of `Type=notify`: datagrams to the socket that it names."""

import asyncio
import os
import socket
from contextlib import suppress

from vllm import envs


def notify(state: str) -> None:
    """Sends `READY=1`, `STOPPING=1` or `WATCHDOG=1`; nothing where no NOTIFY_SOCKET is set. Never
    fails: a service works without its manager."""
    address = envs.foreign("NOTIFY_SOCKET")
    if address is None:
        return
    if address.startswith("@"):  # Linux's abstract names
        address = "\0" + address[1:]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(state.encode(), address)


def watchdog_seconds() -> float | None:
    """The longest time between two `WATCHDOG=1` (`WatchdogSec=` of the unit); None where systemd
    watches nothing, or another process."""
    given, pid = envs.foreign("WATCHDOG_USEC"), envs.foreign("WATCHDOG_PID")
    if given is None or not given.isdigit() or int(given) == 0:
        return None
    if pid is not None and pid != str(os.getpid()):
        return None
    return int(given) / 1e6


async def feed_watchdog(seconds: float) -> None:
    """Tells systemd that this event loop turns; engines are watched by this process itself."""
    while True:
        notify("WATCHDOG=1")
        await asyncio.sleep(seconds / 3)
