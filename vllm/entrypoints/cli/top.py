"""`vllm top`: a running server in a terminal, from its `/metrics` and `/kernels`."""

import argparse
import asyncio
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.entrypoints.cli.bench_serve import check_numbers
from vllm.entrypoints.cli.client import Server
from vllm.entrypoints.cli.top_metrics import Frame, Snapshot, frame, snapshot
from vllm.errors import ConfigError
from vllm.kernels.report.json_report import parse_report
from vllm.utils.http_client import HttpClient, HttpError

if TYPE_CHECKING:
    from rich.console import Console

    from vllm.entrypoints.cli.top_view import Kernel

# Of latencies; rates are of the last second or what --interval says.
_WINDOW_S = 60.0
_TIMEOUT_S = 10.0


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "top",
        description="Show a running server: requests, tokens per second, latencies of the last "
        "minute, KV cache, prefix hits and kernels. In a terminal until Ctrl-C; elsewhere, or with "
        "a dumb terminal, a frame at each interval. Needs rich.",
    )
    flag = parser.add_argument
    flag("--url", default="http://localhost:8000/v1",
         help="URL of the API (default: http://localhost:8000/v1).")  # fmt: skip
    flag("--api-key", help="API key; default: VLLM_API_KEY.")
    flag("--interval", type=float, default=1.0, metavar="SECONDS",
         help="Time between two frames, and that rates are of (default: 1).")  # fmt: skip
    flag("--once", action="store_true", help="Print one frame and end.")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_numbers(args, "a number of seconds of 0.1 or more", lambda n: n >= 0.1, "interval")
    try:
        from rich.console import Console
    except ImportError as error:
        raise ConfigError(
            "vllm top needs rich: pip install rich, or pip install 'vllm[top]'"
        ) from error
    url = Server(args.url, None).url.removesuffix("/v1")
    return asyncio.run(_watch(url, args, Console()))


async def _watch(url: str, args: argparse.Namespace, console: "Console") -> int:
    """HttpError where nobody answers at first; later that is shown, and asked again."""
    from vllm.entrypoints.cli.top_view import shown, view

    key = args.api_key or envs.VLLM_API_KEY
    async with HttpClient(url, key, _TIMEOUT_S, uses_proxy=True) as client:
        past = deque([await _snapshot(client)])
        kernels = await _kernels(client, url)
        with shown(console, is_live=not args.once) as show:
            while True:
                await asyncio.sleep(args.interval)
                try:
                    past.append(await _snapshot(client))
                except HttpError as error:
                    if args.once:
                        raise
                    show(str(error))
                    continue
                while past[-1].seconds - past[0].seconds > _WINDOW_S and len(past) > 2:
                    past.popleft()
                show(view(url, of(past), kernels))
                if args.once:
                    return 0


def of(past: "deque[Snapshot]") -> Frame:
    """Rates of the last interval, latencies of all of it."""
    latest, whole = frame(past[-2], past[-1]), frame(past[0], past[-1])
    return latest._replace(
        latencies=whole.latencies, latencies_since_start=whole.latencies_since_start
    )


async def _snapshot(client: HttpClient) -> Snapshot:
    return snapshot(await client.get_text("/metrics"), time.monotonic())


async def _kernels(client: HttpClient, url: str) -> "Counter[Kernel]":
    """How many layers each serves. They change with a start alone."""
    from vllm.entrypoints.cli.top_view import Kernel

    report = parse_report(await client.get_json("/kernels"), f"{url}/kernels")
    return Counter(
        Kernel(d.kernel or "none", str(d.problem.format), d.problem.family, d.origin.text)
        for _, d in report.records
    )
