"""Opens the socket and starts the engine, before the web framework is imported.

Imports nothing heavy, so that a port in use is told at once and the engine's process starts to
load the model before this one has imported FastAPI.
"""

import asyncio
import errno
import resource
import socket
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.http_setup import BACKLOG, prepare_process, tracer_of
from vllm.entrypoints.openai.settings import ServerSettings
from vllm.errors import ConfigError
from vllm.logger import get_logger
from vllm.utils.ports import taken_text
from vllm.utils.startup import no_collections

logger = get_logger(__name__)

_MAX_FILES = 65536


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free port. ConfigError says why it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # SO_REUSEADDR lets two sockets bind one port as long as neither listens.
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            fix = taken_text(host, port, "--port ")
        else:
            fix = f"{error}; choose another with --host and --port"
        raise ConfigError(f"cannot listen on {host}:{port}: {fix}") from error
    return listener


def bind_path(path: str) -> socket.socket:
    """A listening Unix socket at `path`, which a server that ended may have left behind.
    ConfigError says why it cannot be had."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket():
            if _answers(path):
                raise OSError("another server listens there")
            Path(path).unlink()
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on --uds {path}: {error}; choose another path") from error
    return listener


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        return client.connect_ex(path) == 0


def warn_if_open(listener: socket.socket, has_key: bool) -> None:
    """A warning where other machines reach the server and no key is asked for."""
    if has_key or listener.family == socket.AF_UNIX:
        return
    host, port = listener.getsockname()[:2]
    if not ip_address(host.partition("%")[0]).is_loopback:
        logger.warning(
            "listening on %s port %d without an API key: whoever reaches this machine may use the "
            "server. Set VLLM_API_KEY or --api-key-file, or listen on --host 127.0.0.1",
            host,
            port,
        )


def raise_file_limit() -> None:
    """Lets this process hold many connections: the soft limit on open files goes up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def serve(
    args: EngineArgs,
    listener: socket.socket,
    settings: ServerSettings,
    on_ready: Callable[[str], None],
) -> None:
    """Serves until SIGTERM or SIGINT, and returns once running requests are finished.

    on_ready gets the name of the served model. Raises what the engine says when the model cannot
    be loaded, and EngineDeadError when the engine dies later.
    """
    from vllm.engine.async_llm import AsyncLLM
    from vllm.engine.supervision import Supervision

    prepare_process()
    with no_collections():
        supervision = Supervision(settings.dead_after, settings.restarts)
        is_alone = settings.api_server_count == 1
        engine = AsyncLLM(args, supervision, has_tokenizer=is_alone)
    try:
        if not is_alone:
            with no_collections():
                from vllm.entrypoints.openai.api_servers import ApiServers

                servers = ApiServers(engine, settings, listener)
            await servers.run(on_ready)
            return
        engine.tracer = tracer_of(engine, settings)
        with no_collections():
            from vllm.entrypoints.openai.server import Server

            server = Server(engine, settings)
        await server.run(listener, on_ready)
    finally:
        await asyncio.shield(engine.shutdown())
