"""Decisions as JSON, both ways: GET /kernels, --dump-decisions, `vllm kernels explain --json`."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import GenericAlias, UnionType
from typing import Any, get_args

from vllm.errors import ConfigError, did_you_mean
from vllm.formats.act_scheme import ActScheme
from vllm.formats.scales import Scales
from vllm.formats.weight_format import WeightFormat
from vllm.kernels.evidence.splits import Timings
from vllm.kernels.evidence.steps import Step
from vllm.kernels.report.calls import Calls, kind_of, measured_calls
from vllm.kernels.report.layer_groups import by_decision
from vllm.kernels.report.ledger import Entry, Ledger
from vllm.kernels.report.question import parse_lib
from vllm.kernels.report.report import ModelFacts, Report
from vllm.kernels.report.side_effects import side_effect
from vllm.kernels.report.text_report import expectation_of
from vllm.kernels.select.decision import (
    ByBackend,
    Candidate,
    Decision,
    FasterInBf16,
    Parts,
    Record,
)
from vllm.kernels.select.grade import Grade
from vllm.kernels.select.problem import Problem
from vllm.kernels.select.reason import Origin, Why
from vllm.machine import Device, Libs
from vllm.utils import dataclasses

_PROBLEMS: dict[str, type[Problem]] = {kind.family: kind for kind in get_args(Problem)}


# ---------------------------------------------------------------- to JSON


def report(
    device: Device,
    libs: Libs,
    env: Mapping[str, Any],
    records: Iterable[Record],
    ledger: Ledger | None = None,
    model: ModelFacts | None = None,
    calls: Calls | None = None,
) -> dict[str, Any]:
    """Everything that was decided and on what grounds; equal decisions once, with their layers."""
    content: dict[str, Any] = {
        "device": str(device),
        "libs": sorted(map(str, libs.libs)),
        "env": variable_texts(env),
        **({} if model is None else {"model": _model_json(model)}),
        **({} if calls is None else {"calls": _calls_json(calls)}),
        "decisions": [
            {**_decision_json(decision, layers), **_measured_json(decision, layers, calls)}
            for decision, layers in by_decision(records).items()
        ],
    }
    return content if ledger is None else {**content, "ledger": ledger.to_json()}


def _model_json(model: ModelFacts) -> dict[str, Any]:
    return {"served": model.is_served, "notes": list(model.notes)}


def with_calls(content: dict[str, Any], calls: Calls) -> dict[str, Any]:
    """What `report` made, with how often its kernels were called. calls: also of kinds of layers
    that it has none of."""
    made = parse_report(content)
    kinds = {kind_of(decision, layers) for decision, layers in by_decision(made.records).items()}
    own = {kind: calls[kind] for kind in kinds & calls.keys()}
    return report(*made._replace(calls=own))


def _calls_json(calls: Calls) -> dict[str, dict[str, int]]:
    """JSON has texts as keys."""
    return {kind: {str(m): own[m] for m in sorted(own)} for kind, own in sorted(calls.items())}


def _measured_json(
    decision: Decision, layers: Sequence[str], calls: Calls | None
) -> dict[str, dict[str, dict[str, int]]]:
    found = measured_calls(decision, layers, calls) if calls is not None else None
    return {} if found is None else {"calls": _calls_json(found._asdict())}


def variable_texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Parsed values of variables as one writes them: switches are 0 or 1."""
    return {
        name: str(int(value)) if isinstance(value, bool) else str(value)
        for name, value in values.items()
    }


def _decision_json(decision: Decision, layers: list[str]) -> dict[str, Any]:
    problem, timings = decision.problem, decision.timings
    content = {
        "layers": list(layers),
        "problem": {"family": problem.family, "text": str(problem), **_plain(problem)},
        "chosen": decision.chosen,
        **({"emulated": str(decision.device)} if decision.is_emulated else {}),
        "origin": _plain(decision.origin),
        **({"event": text} if (text := side_effect(decision)) else {}),
        "candidates": _plain(decision.candidates),
    }
    if timings is not None:
        by_backend = {"us": timings.us, "noise": timings.noise}
        content["timings"] = _plain(timings) | {
            key: {name: list(row) for name, row in rows} for key, rows in by_backend.items()
        }
        content["expected"] = _plain(expectation_of(decision))
    if decision.faster_in_bf16 is not None:
        content["faster_in_bf16"] = _plain(decision.faster_in_bf16)
    return content


def _plain(value: Any) -> Any:
    """Dataclasses as objects, tuples as lists, formats and enums as texts."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str | WeightFormat):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in _compared(value)}
    return value


def _compared(kind: Any) -> list[dataclasses.Field]:
    """The fields that a value is equal by; others are of use while it is made."""
    return [f for f in dataclasses.fields(kind) if f.compare]


# ---------------------------------------------------------------- from JSON


def parse_report(content: Any, source: str = "report") -> Report:
    """The values of what `report` made; ConfigError names `source` and the place that is wrong."""
    root = _Node(content, source, "")
    # `upstream`, of `vllm kernels explain --for`, follows from the decisions.
    root.allow("device", "libs", "env", "model", "calls", "decisions", "ledger", "upstream")
    device = root["device"].parsed(Device.parse)
    records = [
        (layer.of(str), decision)
        for node in root["decisions"].items()
        for decision in (_decision(node, device),)
        for layer in node["layers"].items()
    ]
    return Report(
        device,
        Libs.of(node.parsed(parse_lib) for node in root["libs"].items()),
        {name: root["env"][name].of(str) for name in root["env"].fields()},
        records,
        _ledger(root["ledger"]) if "ledger" in root.fields() else None,
        _model(root["model"]) if "model" in root.fields() else None,
        _calls(root["calls"]) if "calls" in root.fields() else None,
    )


@dataclasses.dataclass(frozen=True)
class _Node:
    """A JSON value and where it stands, so that an error can name the place."""

    value: Any
    source: str
    place: str

    def __getitem__(self, key: str) -> "_Node":
        if key not in self.fields():
            raise self.error(f"lacks {key!r}")
        return _Node(self.value[key], self.source, f"{self.place}.{key}".lstrip("."))

    def fields(self) -> list[str]:
        return list(self.of(dict))

    def items(self) -> Iterator["_Node"]:
        for i, item in enumerate(self.of(list)):
            yield _Node(item, self.source, f"{self.place}[{i}]")

    def key(self, key: str) -> "_Node":
        """The key itself as a value."""
        return _Node(key, self.source, self.place)

    def positive(self) -> int:
        if (number := int(self.of(int))) < 1:
            raise self.error("is less than 1")
        return number

    def allow(self, *known: str) -> None:
        for key in self.fields():
            if key not in known:
                hint = did_you_mean(key, known) or f"; it takes {', '.join(known)}"
                raise self.error(f"has the unknown field {key!r}{hint}")

    def parsed(self, parse: Callable[[str], Any]) -> Any:
        try:
            return parse(self.of(str))
        except ConfigError as error:
            raise self.error(str(error)) from None
        except ValueError as error:
            raise self.error(f"is not valid: {error}") from None

    def error(self, text: str) -> ConfigError:
        shown = "" if isinstance(self.value, dict | list) else f" {self.value!r}"
        return ConfigError(f"{self.source}: {self.place or 'the whole'}{shown} {text}")

    def of(self, kind: Any) -> Any:
        """The value, which is of one of _KINDS."""
        accepted, name = _KINDS[kind]
        is_switch = isinstance(self.value, bool)
        is_of_kind = isinstance(self.value, accepted) and is_switch == (kind is bool)
        if not is_of_kind:
            raise self.error(f"is not {name}")
        if kind is float and not math.isfinite(self.value):
            raise self.error("is not a finite number")
        return self.value


# The values that JSON has, by the type that a field is declared with; True is no number.
_KINDS: dict[Any, tuple[type | UnionType, str]] = {
    str: (str, "a text"),
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: (int | float, "a number"),
    list: (list, "a list"),
    dict: (dict, "an object"),
}
# Types that are written as text.
_PARSERS: dict[Any, Callable[[str], Any]] = {
    ActScheme: ActScheme,
    Grade: Grade,
    WeightFormat: WeightFormat.parse,
    Why: Why,
}
_PART = get_args(Parts)[0]


def _read(node: _Node, kind: Any) -> Any:
    """The value of type `kind` that `_plain` wrote."""
    args = get_args(kind)
    if kind in _KINDS:
        return node.of(kind)
    if kind in _PARSERS:
        return node.parsed(_PARSERS[kind])
    if isinstance(kind, UnionType):  # with None
        return None if node.value is None else _read(node, args[0])
    if dataclasses.is_dataclass(kind):
        return _fields(node, kind)
    items = list(node.items())
    if args[-1:] == (...,):
        return tuple(_read(item, args[0]) for item in items)
    if len(items) != len(args):
        text = "[largest M or null, backend]" if kind == _PART else f"a list of {len(args)}"
        raise node.error(f"is not {text}")
    return tuple(map(_read, items, args))


def _fields(node: _Node, kind: Any, derived: Sequence[str] = ()) -> Any:
    """A value of dataclass `kind`. derived: what the object holds besides; where it does, fields
    with a default may be left out."""
    fields = _compared(kind)
    node.allow(*derived, *(f.name for f in fields))
    given = node.fields()
    may_lack = {f.name for f in fields if derived and f.default is not dataclasses.MISSING}
    values = {
        f.name: _read(node[f.name], f.type)
        for f in fields
        if f.name in given or f.name not in may_lack
    }
    return kind(**values)


def _model(node: _Node) -> ModelFacts:
    node.allow("served", "notes")
    return ModelFacts(node["served"].of(bool), _read(node["notes"], tuple[str, ...]))


def _calls(node: _Node) -> Calls:
    counts = ((kind, node[kind]) for kind in node.fields())
    return {
        kind: {own.key(m).parsed(_positive): own[m].positive() for m in own.fields()}
        for kind, own in counts
    }


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError("less than 1")
    return number


def _ledger(node: _Node) -> Ledger:
    node.allow("summary", "entries")
    return Ledger(list(_read(node["entries"], tuple[Entry, ...])))


def _decision(node: _Node, device: Device) -> Decision:
    node.allow(
        *("layers", "problem", "chosen", "emulated", "origin", "event", "candidates", "timings"),
        *("expected", "calls", "faster_in_bf16"),
    )
    is_emulated = "emulated" in node.fields()
    if is_emulated:
        device = node["emulated"].parsed(Device.parse)
    candidates = tuple(map(_candidate, node["candidates"].items()))
    chosen = _read(node["chosen"], str | None)
    if chosen is not None and chosen not in {candidate.backend for candidate in candidates}:
        raise node["chosen"].error("is none of the candidates")
    origin = _read(node["origin"], Origin)
    timings = _timings(node["timings"]) if "timings" in node.fields() else None
    problem = _problem(node["problem"])
    has_bf16 = "faster_in_bf16" in node.fields()
    bf16 = _read(node["faster_in_bf16"], FasterInBf16) if has_bf16 else None
    return Decision(problem, device, chosen, origin, candidates, timings, is_emulated, bf16)


def _timings(node: _Node) -> Timings:
    node.allow("source", "tokens", "us", "stale", "grade", "error", "noise", "steps")
    tokens = _read(node["tokens"], tuple[int, ...])
    steps = _steps(node["steps"], tokens) if "steps" in node.fields() else ()
    row = GenericAlias(tuple, (float | None,) * len(tokens))

    def by_backend(own: _Node) -> ByBackend:
        return tuple((name, _read(own[name], row)) for name in own.fields())

    us = by_backend(node["us"])
    noise = by_backend(node["noise"]) if "noise" in node.fields() else ()
    stale = _read(node["stale"], tuple[tuple[str, str, str], ...])
    grade = node["grade"].parsed(Grade)
    error = _read(node["error"], tuple[tuple[str, tuple[float, ...]], ...])
    return Timings(node["source"].of(str), tokens, us, stale, grade, error, noise, steps)


def _steps(node: _Node, tokens: tuple[int, ...]) -> tuple[str, ...]:
    steps = [item.parsed(Step.parse) for item in node.items()]
    if steps and tokens != tuple(step.num_tokens for step in steps):
        raise node.error("are not steps of as many tokens")
    return tuple(step.name for step in steps)


def _problem(node: _Node) -> Problem:
    family = node["family"].of(str)
    if family not in _PROBLEMS:
        raise node["family"].error(f"is unknown: it takes {', '.join(_PROBLEMS)}")
    problem: Problem = _fields(node, _PROBLEMS[family], ("family", "text"))
    return problem


def _candidate(node: _Node) -> Candidate:
    candidate: Candidate = _fields(node, Candidate)
    scales = node["scales"].parsed(Scales) if candidate.scales else ""
    return dataclasses.replace(candidate, scales=scales)
