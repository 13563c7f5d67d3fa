"""`vllm kernels tune --from URL`: what a running server asks of its kernels."""

import argparse
import asyncio
import sys
from typing import Any
from urllib.parse import urlsplit

from vllm import envs
from vllm.errors import ConfigError
from vllm.kernels.report.calls import steps_text
from vllm.kernels.report.json_report import parse_report
from vllm.kernels.report.report import Report
from vllm.kernels.tuning.jobs import Job
from vllm.kernels.tuning.traffic import Traffic, traffic_of
from vllm.machine import Device
from vllm.utils.http_client import HttpClient, HttpError

_SECONDS = 30.0


def add_from(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sizes of a running server")
    text = group.add_argument
    text("--from", dest="url", metavar="URL", help="Measure the layers of the server at this "
         "address, for the numbers of tokens that its steps had: first those that no measurement "
         "chose a kernel for, in order of the time spent in them. MODEL is then only compared "
         "with what is served.")  # fmt: skip
    text("--api-key", help="API key of that server; default: VLLM_API_KEY.")


def ask_server(args: argparse.Namespace, device: Device) -> Traffic:
    """Prints what is asked of it. ConfigError, HttpError: there is no such server, or another model
    is meant. device: this machine's."""
    usual: dict[str, Any] = {
        "tp": "1",
        "ep": "1",
        "dtype": "auto",
        "kv_cache_dtype": "auto",
        "layer": [],
    }
    usual |= {"quantization": None, "hf_overrides": None}
    given = {
        f"--{name.replace('_', '-')}": getattr(args, name) != value for name, value in usual.items()
    }
    given["a second MODEL"] = len(args.models) > 1
    if refused := [name for name, is_given in given.items() if is_given]:
        raise ConfigError(
            f"--from {args.url}: layers and their sizes are the server's; leave out {refused[0]}"
        )
    url = _base(args.url)
    content, names = asyncio.run(_answers(url, args.api_key or envs.VLLM_API_KEY))
    if args.models and not _is_served(args.models[0], names):
        raise ConfigError(
            f"--from {url}: it serves {', '.join(names)}, not {args.models[0]}; leave MODEL out "
            f"or give the address of its server"
        )
    try:
        report = parse_report(content, f"{url}/kernels")
    except ConfigError as error:
        raise ConfigError(f"{error}; --from takes a vllm serve of this version") from None
    _say(url, report, device)
    return traffic_of(report, is_same_chip=report.device == device)


def plan_line(job: Job, traffic: Traffic | None) -> str:
    """Numbers of tokens in order; of a server also the share of time without a measurement."""
    first = [m for m in job.tokens if m in (job.first or ())]
    rest = [m for m in job.tokens if m not in first]
    tokens = ", then ".join(", ".join(map(str, own)) for own in (first, rest) if own)
    share = (
        ""
        if traffic is None or not traffic.tokens
        else f"{traffic.share(job.problem.size_key):>4.0%}  "
    )
    return f"{share}{job}  {'M = ' * bool(job.counts)}{tokens}"


def _say(url: str, report: Report, device: Device) -> None:
    if report.device != device:
        text = f"it runs on {report.device}, and this is {device}: its steps and sizes count, times"
        print(f"warning: {url}: {text} and choices are of this machine", file=sys.stderr)
    if any(decision.is_emulated for _, decision in report.records):
        print(f"left out: layers for which {url} emulates another chip")
    if report.calls:
        print(f"{url}: steps: {steps_text(report.calls)}")
    else:
        print(f"{url}: it has counted no step yet, so the usual numbers of tokens are measured")


def _base(given: str) -> str:
    """Without the /v1 that clients of the API are given."""
    try:
        parts = urlsplit(given if "//" in given else f"http://{given}")
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_address &= parts.port != 0 and not parts.query
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError(f"--from {given!r}: it takes an address such as http://localhost:8000")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


async def _answers(url: str, api_key: str | None) -> tuple[Any, list[str]]:
    """/kernels as JSON, and the names of the model that is served."""
    try:
        async with asyncio.timeout(_SECONDS), HttpClient(url, api_key, uses_proxy=True) as client:
            content = await client.get_json("/kernels")
            models = await client.get_json("/v1/models")
    except TimeoutError:
        raise HttpError(f"{url}: no answer within {_SECONDS:g} s") from None
    except HttpError as error:
        hint = "; --api-key or VLLM_API_KEY gives it" if "HTTP 401" in str(error) else ""
        raise HttpError(f"{error}{hint}") from None
    try:
        cards = models["data"]
        return content, list(dict.fromkeys(str(c[key]) for key in ("id", "root") for c in cards))
    except (LookupError, TypeError):
        raise HttpError(f"{url}/v1/models lists no models: {models!r:.80}") from None


def _is_served(model: str, names: list[str]) -> bool:
    """By a served name, or by the last part of the folder or of the name on the hub."""
    last = model.rstrip("/").rpartition("/")[2]
    return any(model == name or last == name.rstrip("/").rpartition("/")[2] for name in names)
