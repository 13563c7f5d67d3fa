"""The metrics of an engine as values."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm.engine.metrics import Metrics


@dataclass(frozen=True)
class Metric:
    """name: with the prefix `vllm:`."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    value: int


@dataclass(frozen=True)
class Gauge(Metric):
    value: float


@dataclass(frozen=True)
class Histogram(Metric):
    """buckets: values up to each limit, by the limit as a text."""

    count: int
    sum: float
    buckets: dict[str, int]


def read_metrics(metrics: Metrics) -> list[Metric]:
    """All of `metrics` whose names begin with `vllm:`, as they are now."""
    metrics.on_render()
    return [
        metric
        for family in metrics.registry.collect()
        if family.name.startswith("vllm:")
        for metric in _values(family)
    ]


def _values(family: Any) -> Iterator[Metric]:
    histograms: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    name, kind = family.name, family.type
    for sample in family.samples:
        labels = dict(sample.labels)
        if kind == "counter" and sample.name.endswith("_total"):
            yield Counter(name, labels, int(sample.value))
        elif kind == "gauge":
            yield Gauge(name, labels, sample.value)
        elif kind == "histogram" and not sample.name.endswith("_created"):
            limit = labels.pop("le", sample.name.removeprefix(name))
            histograms.setdefault(tuple(labels.items()), {})[limit] = sample.value
    for key, found in histograms.items():
        total, count = found.pop("_sum"), found.pop("_count")
        buckets = {limit: int(value) for limit, value in found.items()}
        yield Histogram(name, dict(key), int(count), total, buckets)
