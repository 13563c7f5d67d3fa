"""What `vllm top` shows, from two answers of `/metrics`: rates between them, and quantiles of what
was counted between them."""

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from vllm.errors import ConfigError

_PREFIX = "vllm:"
LATENCIES = {
    "first token": "time_to_first_token_seconds",
    "between tokens": "inter_token_latency_seconds",
    "whole request": "e2e_request_latency_seconds",
    "in the queue": "request_queue_time_seconds",
}
"""Histograms by what they are called on the screen."""
QUANTILES = (0.5, 0.9, 0.99)

Buckets = Mapping[float, float]
"""How many values were at most each bound; the last bound is infinite."""


class Snapshot(NamedTuple):
    """One answer. seconds: when, by time.monotonic. values: by name without `vllm:`, summed over
    labels. means: the same, mean over labels. buckets: of histograms. models: their names."""

    seconds: float
    values: Mapping[str, float]
    means: Mapping[str, float]
    buckets: Mapping[str, Buckets]
    models: tuple[str, ...]


class Frame(NamedTuple):
    """seconds: between the snapshots. Rates are per second. latencies: seconds, by the keys of
    LATENCIES, at QUANTILES; None where nothing was counted. prefix_hits: share of prompt tokens,
    None where there were none. latencies_since_start: where nothing ended between the snapshots."""

    models: tuple[str, ...]
    seconds: float
    running: int
    waiting: int
    kv_cache: float
    generation_rate: float
    prompt_rate: float
    request_rate: float
    prefix_hits: float | None
    preemptions: int
    restarts: int
    latencies: Mapping[str, tuple[float, ...] | None]
    latencies_since_start: bool


def snapshot(text: str, seconds: float) -> Snapshot:
    """ConfigError for an answer that is not a vllm server's."""
    values: dict[str, float] = {}
    series: dict[str, int] = {}
    buckets: dict[str, dict[float, float]] = {}
    models: set[str] = set()
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError as error:
        raise ConfigError(f"/metrics is not in Prometheus' text format: {error}") from error
    for family in families:
        for sample in family.samples if family.name.startswith(_PREFIX) else ():
            name = sample.name.removeprefix(_PREFIX)
            models |= {sample.labels["model_name"]} if "model_name" in sample.labels else set()
            if "le" in sample.labels:
                own = buckets.setdefault(name.removesuffix("_bucket"), {})
                bound = float(sample.labels["le"])
                own[bound] = own.get(bound, 0.0) + sample.value
            else:
                values[name] = values.get(name, 0.0) + sample.value
                series[name] = series.get(name, 0) + 1
    if "num_requests_running" not in values:
        raise ConfigError("/metrics has no vllm:num_requests_running: no vllm serve answers there")
    means = {name: value / series[name] for name, value in values.items()}
    return Snapshot(seconds, values, means, buckets, tuple(sorted(models)))


def frame(before: Snapshot, now: Snapshot) -> Frame:
    seconds = max(now.seconds - before.seconds, 1e-9)

    def change(name: str, since: Snapshot = before) -> float:
        return now.values.get(name, 0.0) - since.values.get(name, 0.0)

    latencies = dict(_latencies(before, now))
    is_quiet = not any(latencies.values())
    if is_quiet:
        latencies = dict(_latencies(now._replace(buckets={}), now))
    return Frame(
        now.models,
        seconds,
        int(now.values["num_requests_running"]),
        int(now.values.get("num_requests_waiting", 0)),
        now.means.get("kv_cache_usage_perc", 0.0),
        change("generation_tokens_total") / seconds,
        change("prompt_tokens_total") / seconds,
        change("request_success_total") / seconds,
        _share(now.values, "prefix_cache_hits_total", "prefix_cache_queries_total"),
        int(now.values.get("num_preemptions_total", 0)),
        int(now.values.get("engine_restarts_total", 0)),
        latencies,
        is_quiet,
    )


def _share(values: Mapping[str, float], part: str, whole: str) -> float | None:
    return values.get(part, 0.0) / values[whole] if values.get(whole) else None


def _latencies(before: Snapshot, now: Snapshot) -> Iterator[tuple[str, tuple[float, ...] | None]]:
    for shown, name in LATENCIES.items():
        own = now.buckets.get(name, {})
        past = before.buckets.get(name, {})
        counted = {bound: number - past.get(bound, 0.0) for bound, number in own.items()}
        found = [quantile(counted, share) for share in QUANTILES]
        yield shown, tuple(q for q in found if q is not None) or None


def quantile(counted: Buckets, share: float) -> float | None:
    """Interpolated in its bucket, as Prometheus' histogram_quantile does; None for no values. Of
    one beyond the last finite bound that bound."""
    bounds = sorted(counted)
    if not bounds or counted[bounds[-1]] <= 0:
        return None
    wanted = share * counted[bounds[-1]]
    for low, high in pairwise([0.0, *bounds]):
        below = counted.get(low, 0.0)
        if counted[high] >= wanted:
            inside = counted[high] - below
            is_open = math.isinf(high)
            return low if is_open or not inside else low + (high - low) * (wanted - below) / inside
    return bounds[-1]
