"""`vllm bench serve`: load on a running server, with throughput and latency as clients see them."""

import argparse
import asyncio
import json
import math
import random
import statistics
import string
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.errors import ConfigError
from vllm.utils.http_client import HttpClient, HttpError

_METRICS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token, the first left out",
    "itl": "Time between two events of a stream",
    "e2el": "Request, start to end",
}
_NUM_ERRORS_SHOWN = 3
_POOL_CHARS = 6000


def add_flags(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--backend", choices=("vllm",), default="vllm", help="Kind of server.")
    flag("--base-url", help="Address of the server; instead of --host and --port.")
    flag("--host", default="127.0.0.1")
    flag("--port", type=int, default=8000)
    flag("--endpoint", default="/v1/completions", help="Path of the completions API.")
    flag("--api-key", help="API key; default: VLLM_API_KEY.")
    flag("--model", help="Model name; default: the first that the server lists.")
    flag("--dataset-name", choices=("random",), default="random", help="Random token ids.")
    flag("--num-prompts", type=int, default=1000)
    flag("--random-input-len", type=int, default=1024, help="Mean prompt length in tokens.")
    flag("--random-output-len", type=int, default=128, help="Mean output length in tokens.")
    flag("--random-range-ratio", type=float, default=0.0,
         help="Lengths vary uniformly by this share in both directions (default: 0).")  # fmt: skip
    flag("--request-rate", type=float, default=math.inf,
         help="Requests per second; default: all at once.")  # fmt: skip
    flag("--burstiness", type=float, default=1.0,
         help="Shape of the gamma distribution of gaps: 1 is Poisson.")  # fmt: skip
    flag("--max-concurrency", type=int, help="Maximum concurrent requests.")
    flag("--ignore-eos", action="store_true", help="Generate to the full output length.")
    flag("--temperature", type=float, default=0.0)
    flag("--seed", type=int, default=0, help="Seed of prompts, lengths and arrivals.")
    flag("--percentile-metrics", default="ttft,tpot,itl,e2el", help="Metrics to report.")
    flag("--metric-percentiles", default="50,90,99", help="Percentiles to report.")
    flag("--save-result", action="store_true", help="Write a JSON file.")
    flag("--result-filename", help="Name of that file; default: from the time.")


@dataclass(frozen=True)
class Job:
    """One request to make: `delay` seconds after the start."""

    prompt: list[int]
    output_len: int
    delay: float


@dataclass
class Timing:
    """One request as measured by the client, in seconds. gaps: between its events."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    ttft: float = 0.0
    e2el: float = 0.0
    gaps: list[float] = field(default_factory=list)
    error: str | None = None


def run(args: argparse.Namespace) -> int:
    """Prints the report; 1 if no request succeeded."""
    metrics = [name for name in args.percentile_metrics.split(",") if name]
    if unknown := [name for name in metrics if name not in _METRICS]:
        raise ConfigError(f"--percentile-metrics {unknown[0]!r}: it takes {', '.join(_METRICS)}")
    percentiles = _percentiles_of(args.metric_percentiles)
    _check(args)
    timings, duration, model = asyncio.run(_run(args))
    result = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "model_id": model,
        "num_prompts": args.num_prompts,
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **summarise(timings, duration, metrics, percentiles),
    }
    _print(result, metrics, percentiles)
    if args.save_result:
        path = Path(args.result_filename or f"{args.backend}-{result['date']}.json")
        path.write_text(json.dumps({**result, "requests": list(map(asdict, timings))}) + "\n")
        print(f"Written to {path}")
    return 0 if result["completed"] else 1


def _check(args: argparse.Namespace) -> None:
    check_numbers(args, "0 to below 1", lambda n: 0 <= n < 1, "random_range_ratio")
    counts = ("num_prompts", "random_input_len", "random_output_len", "max_concurrency")
    check_numbers(args, "1 or more", lambda n: n >= 1, *counts)
    check_numbers(args, "a number above 0", lambda n: n > 0, "request_rate", "burstiness")
    if args.result_filename:
        check_writable("--result-filename", args.result_filename)


def check_numbers(
    args: argparse.Namespace, takes: str, is_taken: Callable[[float], bool], *names: str
) -> None:
    """ConfigError for the first of these flags that was given a number it does not take."""
    for name in names:
        value = getattr(args, name, None)
        if value is not None and not is_taken(value):
            raise ConfigError(f"--{name.replace('_', '-')} {value}: it takes {takes}")


def check_writable(flag: str, path: str) -> None:
    """ConfigError for a file that cannot be written, before anything is measured."""
    if Path(path).is_dir() or not Path(path).parent.is_dir():
        raise ConfigError(f"{flag} {path}: it takes a file in a folder that exists")


async def _run(args: argparse.Namespace) -> tuple[list[Timing], float, str]:
    base_url = args.base_url or f"http://{args.host}:{args.port}"
    api_key = args.api_key or envs.VLLM_API_KEY
    async with HttpClient(base_url, api_key, keeps_connections=True) as client:
        model = args.model or await client.first_model()
        jobs = _jobs(args, await _token_pool(client, model, args.seed))
        fields = {"model": model, "temperature": args.temperature, "ignore_eos": args.ignore_eos}
        # One request first: a wrong address or name ends here, and nothing is timed cold.
        first = await _time(client, args.endpoint, fields, Job(jobs[0].prompt, 2, 0.0))
        if first.error is not None:
            raise HttpError(first.error)
        slots = asyncio.Semaphore(args.max_concurrency or len(jobs))
        start = time.perf_counter()

        async def do(job: Job) -> Timing:
            await asyncio.sleep(max(0.0, start + job.delay - time.perf_counter()))
            async with slots:
                return await _time(client, args.endpoint, fields, job)

        timings = await asyncio.gather(*map(do, jobs))
        return timings, time.perf_counter() - start, model


async def _token_pool(client: HttpClient, model: str, seed: int) -> list[int]:
    """Ordinary token ids of the model: what the server makes of random words."""
    rng = random.Random(seed)
    alphabet = string.ascii_letters + string.digits + "    .,;:'?!-"
    text = "".join(rng.choice(alphabet) for _ in range(_POOL_CHARS))
    answer = await client.post_json(
        "/tokenize", {"model": model, "prompt": text, "add_special_tokens": False}
    )
    return sorted(set(answer["tokens"]))


def _jobs(args: argparse.Namespace, pool: list[int]) -> list[Job]:
    rng = random.Random(args.seed)
    jobs, delay = [], 0.0
    for _ in range(args.num_prompts):
        num_in = _spread(rng, args.random_input_len, args.random_range_ratio)
        num_out = _spread(rng, args.random_output_len, args.random_range_ratio)
        jobs.append(Job(rng.choices(pool, k=num_in), num_out, delay))
        if math.isfinite(args.request_rate):
            scale = 1 / (args.request_rate * args.burstiness)
            delay += rng.gammavariate(args.burstiness, scale)
    return jobs


def _spread(rng: random.Random, mean: int, ratio: float) -> int:
    return rng.randint(max(1, math.floor(mean * (1 - ratio))), math.ceil(mean * (1 + ratio)))


async def _time(client: HttpClient, path: str, fields: dict[str, Any], job: Job) -> Timing:
    body = {
        **fields,
        "prompt": job.prompt,
        "max_tokens": job.output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    timing = Timing(num_prompt_tokens=len(job.prompt))
    start = last = time.perf_counter()
    try:
        async with aclosing(client.post_events(path, body)) as events:
            async for event in events:
                now = time.perf_counter()
                if event.get("usage"):
                    timing.num_output_tokens = event["usage"]["completion_tokens"]
                if not event["choices"]:
                    continue
                if timing.ttft:
                    timing.gaps.append(now - last)
                else:
                    timing.ttft = now - start
                timing.e2el, last = now - start, now
    except (HttpError, ValueError, KeyError) as error:
        timing.error = f"{type(error).__name__}: {error}"
    return timing


def summarise(
    timings: Sequence[Timing], duration: float, metrics: Sequence[str], percentiles: Sequence[float]
) -> dict[str, Any]:
    """Counts, rates per second, and each metric's mean, median, deviation, percentiles in ms."""
    done = [timing for timing in timings if timing.error is None]
    num_in = sum(timing.num_prompt_tokens for timing in done)
    num_out = sum(timing.num_output_tokens for timing in done)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(timings) - len(done),
        "errors": sorted({t.error for t in timings if t.error is not None})[:_NUM_ERRORS_SHOWN],
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": len(done) / duration,
        "output_throughput": num_out / duration,
        "total_token_throughput": (num_in + num_out) / duration,
    }
    values = {
        "ttft": [t.ttft for t in done],
        "tpot": [
            (t.e2el - t.ttft) / (t.num_output_tokens - 1) for t in done if t.num_output_tokens > 1
        ],
        "itl": [gap for t in done for gap in t.gaps],
        "e2el": [t.e2el for t in done],
    }
    for name in metrics:
        ms = [1e3 * value for value in values[name]]
        result[f"mean_{name}_ms"] = statistics.fmean(ms) if ms else None
        result[f"median_{name}_ms"] = percentile(ms, 50)
        result[f"std_{name}_ms"] = statistics.pstdev(ms) if ms else None
        for p in percentiles:
            result[f"p{p:g}_{name}_ms"] = percentile(ms, p)
    return result


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Value below which `percent` of `values` lie, interpolated linearly; None of nothing."""
    import numpy as np

    return float(np.percentile(values, percent)) if values else None


def _percentiles_of(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 <= value <= 100 for value in values):
        raise ConfigError(f"--metric-percentiles {text!r}: it takes numbers from 0 to 100")
    return values


def _print(result: dict[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> None:
    rows = (
        ("Requests completed", "completed", "d"),
        ("Requests failed", "failed", "d"),
        ("Duration (s)", "duration", ".2f"),
        ("Input tokens", "total_input_tokens", "d"),
        ("Output tokens", "total_output_tokens", "d"),
        ("Requests per second", "request_throughput", ".2f"),
        ("Output tokens per second", "output_throughput", ".2f"),
        ("All tokens per second", "total_token_throughput", ".2f"),
    )
    for text, key, form in rows:
        print(f"{text:<42}{result[key]:>12{form}}")
    columns = ["mean", *(f"p{p:g}" for p in percentiles)]
    print(f"{'Milliseconds':<42}" + "".join(f"{column:>12}" for column in columns))
    for name in metrics:
        values = [result[f"{column}_{name}_ms"] for column in columns]
        cells = "".join(f"{'-' if value is None else format(value, '.2f'):>12}" for value in values)
        print(f"{_METRICS[name]:<42}{cells}")
    for error in result["errors"]:
        print(f"failed: {error}")
