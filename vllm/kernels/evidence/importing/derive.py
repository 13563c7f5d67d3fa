"""From rows of measurements to a table: series by kernel, and how far they can be trusted."""

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from math import expm1, log
from statistics import fmean, median
from typing import Any, NamedTuple

from vllm.kernels.evidence.imported import (
    BANDS,
    Kind,
    Series,
    Size,
    band_of,
    parse_kind,
    parse_times,
    size_text,
    times_text,
)
from vllm.kernels.evidence.importing.kernels import (
    FORMATS,
    LEFT_OUT,
    NOT_GATED,
    NOT_GATED_LABEL,
    Kernel,
    kernel_of,
)
from vllm.kernels.evidence.importing.sources import Row, System

_FRAMEWORKS = {"sglang": "SGLang", "trtllm": "TensorRT-LLM", "vllm": "vLLM"}
# Pairs of times of one kernel by two frameworks from which a disagreement is taken, and what it is
# taken for where there are fewer.
_LEAST_PAIRS = 20
_UNKNOWN_ERROR = 0.2
_DIGITS = 3


class Provenance(NamedTuple):
    """Where the measurements are from. date, command: of the derivation."""

    commit: str
    date: str
    command: str
    project: str = "AIConfigurator"
    url: str = "https://github.com/ai-dynamo/aiconfigurator"
    licence: str = "Apache-2.0"
    copyright: str = "NVIDIA CORPORATION & AFFILIATES"


class Found(NamedTuple):
    """A label of one framework and format, with its rows. kernel: None where it is in no table;
    reason: why. is_unknown: nobody decided that."""

    measured_by: str
    label: str
    format: str
    num_rows: int
    kernel: Kernel | None
    reason: str = ""
    is_unknown: bool = False


def labels(rows: Iterable[Row], family: str, system: System) -> list[Found]:
    """Every label with what it means on that chip, those with most rows first in each format."""
    counts = Counter((r.dtype, r.framework, r.version, r.label) for r in rows)
    found = []
    for (dtype, framework, version, label), count in counts.items():
        weight_format = FORMATS.get(dtype, dtype)
        kernel = kernel_of(framework, label, family, weight_format, system.chip.device.arch)
        reason = LEFT_OUT.get(dtype, "")
        is_unknown = not reason and (dtype not in FORMATS or kernel is None)
        if is_unknown:
            reason = "unknown: it needs a row in evidence/importing/kernels.py"
        by = measured_by(framework, version)
        known = None if reason else kernel
        found.append(Found(by, label, weight_format, count, known, reason, is_unknown))
    return sorted(found, key=lambda one: (one.format, -one.num_rows, one.measured_by, one.label))


def measured_by(framework: str, version: str) -> str:
    return f"{_FRAMEWORKS.get(framework, framework)} {version}"


def derive(rows: Sequence[Row], family: str, system: System, provenance: Provenance) -> bytes:
    """The table of one chip and problem family; the same bytes for the same arguments."""
    kinds = [_kind(key, series) for key, series in sorted(_by_kind(rows, family, system).items())]
    parsed = [parse_kind(content) for content in kinds]
    known = [disagreements(kind) for kind in parsed]
    elsewhere = _means(known)
    for content, kind, own in zip(kinds, parsed, known):
        content["disagreement"] = own
        content["error"] = _errors(kind, own, elsewhere)
        content["interpolation"] = interpolation_errors(kind)
    content = {
        "source": {
            "project": provenance.project,
            "url": provenance.url,
            "commit": provenance.commit,
            "licence": provenance.licence,
            "copyright": provenance.copyright,
        },
        "derived": {"date": provenance.date, "command": provenance.command},
        "device": str(system.chip.device),
        "num_sms": system.chip.num_sms,
        "memory_gb_per_s": system.chip.memory_gb_per_s,
        "name": system.name,
        "family": family,
        "ranks": system.ranks,
        "bands": BANDS,
        "kinds": kinds,
    }
    text = json.dumps(content, separators=(",", ":")) + "\n"
    return gzip.compress(text.encode(), 9, mtime=0)


# ---------------------------------------------------------------- series


_Key = tuple[str, str, str]
_Times = dict[Size, dict[int, list[float]]]


def _by_kind(
    rows: Sequence[Row], family: str, system: System
) -> dict[_Key, dict[tuple[Kernel, str, str], _Times]]:
    """By format, activation and routing: by kernel, framework and label, times of each size."""
    arch = system.chip.device.arch
    # TP cuts `intermediate`, so what is known of a size is known of all its cuts.
    not_gated = {row.size for row in rows if row.label == NOT_GATED_LABEL}
    found: dict[_Key, dict[tuple[Kernel, str, str], _Times]] = {}
    for row in rows:
        weight_format = FORMATS.get(row.dtype)
        kernel = weight_format and kernel_of(row.framework, row.label, family, weight_format, arch)
        if not weight_format or not kernel:
            continue
        activation = ""
        if family == "moe":
            activation = "relu2" if row.size in not_gated or _is_not_gated(row.size) else "silu"
        series = found.setdefault((weight_format, activation, row.routing), {})
        by = measured_by(row.framework, row.version)
        times = series.setdefault((kernel, by, row.label), defaultdict(dict))
        times[row.size].setdefault(row.tokens, []).append(row.us)
    return found


def _is_not_gated(size: Size) -> bool:
    hidden, intermediate, top_k, num_experts, _ = size
    return any((hidden, intermediate * tp, top_k, num_experts) in NOT_GATED for tp in (1, 2, 4, 8))


def _kind(key: _Key, series: Mapping[tuple[Kernel, str, str], _Times]) -> dict[str, Any]:
    tokens = sorted({m for times in series.values() for own in times.values() for m in own})
    kernels = []
    for (kernel, by, label), times in series.items():
        rows = {
            size_text(size): times_text(median(own[m]) if m in own else None for m in tokens)
            for size, own in sorted(times.items())
        }
        kernels.append(
            {
                "measured_by": by,
                "label": label,
                "name": kernel.name,
                "backend": "" if kernel.fault else kernel.backend,
                "why": kernel.why,
                "fault": kernel.fault,
                "us": rows,
            }
        )
    kernels.sort(key=lambda one: (-len(one["us"]), one["measured_by"], one["label"]))
    weight_format, activation, routing = key
    return {
        "format": weight_format,
        "activation": activation,
        "routing": routing,
        "tokens": tokens,
        "kernels": kernels,
    }


# ---------------------------------------------------------------- errors


_Band = tuple[float, int] | None
_Bands = list[_Band]
Pair = tuple[int, float]
"""A place in BANDS, and the logarithm of a ratio without its sign."""


def disagreements(kind: Kind) -> dict[str, _Bands]:
    """By backend and band, how far two frameworks differ on the same kernel, size and token count:
    the median, and of how many pairs; without backends that one framework alone measured."""
    pairs: dict[str, list[Pair]] = defaultdict(list)
    ranked = [one for one in kind.series if one.backend]
    for a, b in combinations(ranked, 2):
        if a.backend == b.backend and a.framework != b.framework:
            pairs[a.backend] += _pairs(kind, a, b)
    found = {backend: _medians(own) for backend, own in sorted(pairs.items())}
    return {backend: bands for backend, bands in found.items() if any(bands)}


def _pairs(kind: Kind, a: Series, b: Series) -> Iterator[Pair]:
    for size in a.rows.keys() & b.rows.keys():
        times = zip(kind.tokens, parse_times(a.rows[size]), parse_times(b.rows[size]))
        for tokens, x, y in times:
            if x and y:
                yield band_of(tokens), abs(log(x / y))


def _medians(pairs: Iterable[Pair]) -> _Bands:
    """By band, the median as a ratio minus 1, and the number of pairs; None where they are few."""
    bands: list[list[float]] = [[] for _ in BANDS]
    for band, value in pairs:
        bands[band].append(value)
    return [
        (round(expm1(median(own)), _DIGITS), len(own)) if len(own) >= _LEAST_PAIRS else None
        for own in bands
    ]


def _means(known: Iterable[Mapping[str, _Bands]]) -> list[float]:
    """By band, over every backend and kind of a chip and family."""
    bands = list(zip(*(own for kind in known for own in kind.values()))) or [()] * len(BANDS)
    values = [[one[0] for one in band if one] for band in bands]
    return [fmean(own) if own else _UNKNOWN_ERROR for own in values]


def _errors(kind: Kind, known: Mapping[str, _Bands], elsewhere: Sequence[float]) -> list[float]:
    """By band the largest of the backends'. Of one with too few pairs in the band its worst of the
    others; of one that a single framework measured, the mean of what else is known of the chip."""
    worst = {name: max(one[0] for one in bands if one) for name, bands in known.items()}
    return [
        round(
            max(
                (
                    one[0]
                    if name in known and (one := known[name][band])
                    else worst.get(name, elsewhere[band])
                    for name in kind.by_backend
                ),
                default=elsewhere[band],
            ),
            _DIGITS,
        )
        for band in range(len(BANDS))
    ]


def interpolation_errors(kind: Kind) -> list[float]:
    """By band, the median error of an estimate of a size that is left out: of the ratio of two
    backends where there are more, else of the time. [] without sizes to ask."""
    pairs: list[Pair] = []
    for size in kind.complete_sizes():
        measured, estimate = kind.at(size), kind.at(size, skip=lambda other: other == size)  # noqa: B023
        if measured is None or estimate is None:
            continue
        pairs += _errors_of_estimate(
            measured.tokens, dict(measured.us), estimate.tokens, dict(estimate.us)
        )
    found = _medians(pairs)
    worst = max((one[0] for one in found if one), default=_UNKNOWN_ERROR)
    return [one[0] if one else worst for one in found] if pairs else []


def _errors_of_estimate(
    tokens: Sequence[int],
    measured: Mapping[str, Sequence[float | None]],
    at: Sequence[int],
    estimated: Mapping[str, Sequence[float | None]],
) -> Iterator[Pair]:
    first, *others = measured
    for i, m in enumerate(tokens):
        if m not in at:
            continue
        j = at.index(m)
        errors = {
            name: log(x / y)
            for name in measured
            if (x := measured[name][i]) and (y := estimated[name][j])
        }
        if others and first in errors:
            yield from ((band_of(m), abs(errors[n] - errors[first])) for n in others if n in errors)
        elif not others and errors:
            yield band_of(m), abs(errors[first])
