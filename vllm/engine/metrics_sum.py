"""Metrics of several processes as those of one server."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

Sample = tuple[str, dict[str, str], float]

# Gauges that add up; of all others the first process that has one tells it.
_SUMMED_GAUGES = (
    "process_resident_memory_bytes",
    "process_virtual_memory_bytes",
    "process_open_fds",
)


class Family(msgspec.Struct, array_like=True):
    """A metric of one process. samples: name, labels, value."""

    name: str
    documentation: str
    type: str
    samples: list[Sample]

    @property
    def is_count(self) -> bool:
        return self.type in ("counter", "histogram")


def families_of(registry: "CollectorRegistry") -> list[Family]:
    return [
        Family(f.name, f.documentation, f.type, [(s.name, s.labels, s.value) for s in f.samples])
        for f in registry.collect()
    ]


def summed(processes: Iterable[Iterable[Family]]) -> list[Family]:
    """One family of each name. Counters and histograms are sums over the processes."""
    found: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for families in processes:
        for family in families:
            total = found.setdefault(family.name, family)
            own = values.setdefault(family.name, {})
            adds = total.is_count or family.name in _SUMMED_GAUGES
            for name, labels, value in family.samples:
                key = name, tuple(labels.items())
                if key not in own:
                    own[key] = value
                elif adds and not name.endswith("_created"):  # the time of the first process
                    own[key] += value
    return [
        Family(f.name, f.documentation, f.type,
               [(name, dict(labels), value) for (name, labels), value in values[f.name].items()])
        for f in found.values()
    ]  # fmt: skip


def rendered(families: Iterable[Family]) -> bytes:
    """The text exposition format."""
    import prometheus_client
    from prometheus_client.core import Metric

    class Collected:
        def collect(self) -> Iterator[Any]:
            for family in families:
                metric = Metric(family.name, family.documentation, family.type)
                for sample in family.samples:
                    metric.add_sample(*sample)
                yield metric

    registry: Any = Collected()
    return bytes(prometheus_client.generate_latest(registry))
