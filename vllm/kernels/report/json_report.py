"""Decisions as JSON, both ways: GET /kernels, --dump-decisions, `vllm kernels explain --json`.

As text for people: `outcome`, `table` and `log_lines`, of `render.py`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.errors import ConfigError, did_you_mean
from vllm.formats.act_scheme import ActScheme
from vllm.formats.partial_blocks import Fit
from vllm.formats.scales import Scales
from vllm.formats.weight_format import WeightFormat
from vllm.kernels.evidence.splits import Expected, Timings
from vllm.kernels.report.layer_groups import by_decision
from vllm.kernels.report.ledger import Entry, Ledger
from vllm.kernels.report.question import parse_lib
from vllm.kernels.report.report import ModelFacts, Report
from vllm.kernels.report.side_effects import side_effect
from vllm.kernels.report.text_report import expectation, log_lines, outcome, table
from vllm.kernels.select.decision import Candidate, Decision, Record
from vllm.kernels.select.problem import (
    AttentionProblem,
    KVQuantProblem,
    LinearProblem,
    MoEProblem,
    Problem,
)
from vllm.kernels.select.reason import Origin, Reason, Why
from vllm.machine import Device, Libs

__all__ = ["log_lines", "outcome", "parse_report", "report", "table"]

_PROBLEMS: dict[str, type[Problem]] = {
    problem.family: problem
    for problem in (LinearProblem, MoEProblem, AttentionProblem, KVQuantProblem)
}


# ---------------------------------------------------------------- to JSON


def report(
    device: Device,
    libs: Libs,
    env: Mapping[str, Any],
    records: Iterable[Record],
    ledger: Ledger | None = None,
    model: ModelFacts | None = None,
) -> dict[str, Any]:
    """Everything that was decided and on what grounds; equal decisions once, with their layers."""
    content: dict[str, Any] = {
        "device": str(device),
        "libs": sorted(map(str, libs.libs)),
        "env": variable_texts(env),
        **({} if model is None else {"model": _model_json(model)}),
        "decisions": [
            _decision_json(decision, layers) for decision, layers in by_decision(records).items()
        ],
    }
    return content if ledger is None else {**content, "ledger": ledger.to_json()}


def _model_json(model: ModelFacts) -> dict[str, Any]:
    return {"served": model.is_served, "notes": list(model.notes)}


def variable_texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Parsed values of variables as one writes them: switches are 0 or 1."""
    return {
        name: str(int(value)) if isinstance(value, bool) else str(value)
        for name, value in values.items()
    }


def _decision_json(decision: Decision, layers: list[str]) -> dict[str, Any]:
    return {
        "layers": list(layers),
        "problem": _problem_json(decision.problem),
        "chosen": decision.chosen,
        **({"emulated": str(decision.device)} if decision.is_emulated else {}),
        "origin": {"rank": decision.origin.rank, "text": decision.origin.text},
        **({"event": text} if (text := side_effect(decision)) else {}),
        "candidates": [_candidate_json(candidate) for candidate in decision.candidates],
        **_timings_json(decision),
    }


def _timings_json(decision: Decision) -> dict[str, Any]:
    """What was measured, and what follows from it for the choice."""
    timings = decision.timings
    if timings is None:
        return {}
    measured = {
        "source": timings.source,
        "tokens": list(timings.tokens),
        "us": {backend: list(us) for backend, us in timings.us},
        "stale": [list(entry) for entry in timings.stale],
    }
    choice = expectation(decision.candidates, decision.chosen, decision.problem, timings)
    return {"timings": measured, "expected": choice and _fields_json(choice)}


def _problem_json(problem: Problem) -> dict[str, Any]:
    return {"family": problem.family, "text": str(problem), **_fields_json(problem)}


def _fields_json(value: Problem | Fit | Expected) -> dict[str, Any]:
    return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    fit = candidate.fit
    return {
        "backend": candidate.backend,
        "act": _plain(candidate.act),
        "scales": str(candidate.scales),
        "fit": fit and _fields_json(fit),
        "parts": [[limit, backend] for limit, backend in candidate.parts],
        "reasons": [{"why": str(r.why), "text": r.text} for r in candidate.reasons],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, str | WeightFormat) else value


# ---------------------------------------------------------------- from JSON


def parse_report(content: Any, source: str = "report") -> Report:
    """The values of what `report` made; ConfigError names `source` and the place that is wrong."""
    root = _Node(content, source, "")
    root.allow("device", "libs", "env", "model", "decisions", "ledger")
    device = root["device"].parsed(Device.parse)
    records = [
        (layer.text(), decision)
        for node in root["decisions"].items()
        for decision in (_decision(node, device),)
        for layer in node["layers"].items()
    ]
    return Report(
        device,
        Libs.of(node.parsed(parse_lib) for node in root["libs"].items()),
        {name: root["env"][name].text() for name in root["env"].fields()},
        records,
        _ledger(root["ledger"]) if "ledger" in root.fields() else None,
        _model(root["model"]) if "model" in root.fields() else None,
    )


@dataclass(frozen=True)
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
        return list(self._of(dict, "an object"))

    def items(self) -> Iterator["_Node"]:
        for i, item in enumerate(self._of(list, "a list")):
            yield _Node(item, self.source, f"{self.place}[{i}]")

    def allow(self, *known: str) -> None:
        for key in self.fields():
            if key not in known:
                hint = did_you_mean(key, known) or f"; it takes {', '.join(known)}"
                raise self.error(f"has the unknown field {key!r}{hint}")

    def text(self) -> str:
        return str(self._of(str, "a text"))

    def integer(self) -> int:
        if isinstance(self.value, bool):
            raise self.error("is not a whole number")
        return int(self._of(int, "a whole number"))

    def switch(self) -> bool:
        return bool(self._of(bool, "true or false"))

    def number(self) -> float:
        if not isinstance(self.value, int | float) or isinstance(self.value, bool):
            raise self.error("is not a number")
        if not math.isfinite(self.value):
            raise self.error("is not a finite number")
        return self.value

    def optional(self, read: Callable[["_Node"], Any]) -> Any:
        return None if self.value is None else read(self)

    def tuple_of(self, read: Callable[["_Node"], Any], size: int | None = None) -> Any:
        items = tuple(read(node) for node in self.items())
        if size is not None and len(items) != size:
            raise self.error(f"is not a list of {size}")
        return items

    def parsed(self, parse: Callable[[str], Any]) -> Any:
        try:
            return parse(self.text())
        except ConfigError as error:
            raise self.error(str(error)) from None
        except ValueError as error:
            raise self.error(f"is not valid: {error}") from None

    def error(self, text: str) -> ConfigError:
        shown = "" if isinstance(self.value, dict | list) else f" {self.value!r}"
        return ConfigError(f"{self.source}: {self.place or 'the whole'}{shown} {text}")

    def _of(self, kind: type, name: str) -> Any:
        if not isinstance(self.value, kind):
            raise self.error(f"is not {name}")
        return self.value


# How a field of a problem or a fit is read, by the type it is declared with.
_READERS: dict[Any, Callable[[_Node], Any]] = {
    int: _Node.integer,
    str: _Node.text,
    bool: _Node.switch,
    float: _Node.number,
    float | None: lambda node: node.optional(_Node.number),
    tuple[int, int]: lambda node: node.tuple_of(_Node.integer, 2),
    tuple[int, ...]: lambda node: node.tuple_of(_Node.integer),
    tuple[ActScheme, ...]: lambda node: node.tuple_of(lambda item: item.parsed(ActScheme)),
    WeightFormat: lambda node: node.parsed(WeightFormat.parse),
}


def _model(node: _Node) -> ModelFacts:
    node.allow("served", "notes")
    return ModelFacts(node["served"].switch(), node["notes"].tuple_of(_Node.text))


def _ledger(node: _Node) -> Ledger:
    node.allow("summary", "entries")
    return Ledger([_value(Entry, entry) for entry in node["entries"].items()])


def _decision(node: _Node, device: Device) -> Decision:
    node.allow(
        *("layers", "problem", "chosen", "emulated", "origin", "event", "candidates", "timings"),
        "expected",
    )
    is_emulated = "emulated" in node.fields()
    if is_emulated:
        device = node["emulated"].parsed(Device.parse)
    candidates = node["candidates"].tuple_of(_candidate)
    chosen = node["chosen"].optional(_Node.text)
    if chosen is not None and chosen not in {candidate.backend for candidate in candidates}:
        raise node["chosen"].error("is none of the candidates")
    node["origin"].allow("rank", "text")
    origin = Origin(node["origin"]["rank"].integer(), node["origin"]["text"].text())
    timings = _timings(node["timings"]) if "timings" in node.fields() else None
    problem = _problem(node["problem"])
    return Decision(problem, device, chosen, origin, candidates, timings, is_emulated)


def _timings(node: _Node) -> Timings:
    node.allow("source", "tokens", "us", "stale")
    tokens = node["tokens"].tuple_of(_Node.integer)
    rows = node["us"]
    us = tuple(
        (name, rows[name].tuple_of(lambda item: item.optional(_Node.number), len(tokens)))
        for name in rows.fields()
    )
    stale = node["stale"].tuple_of(lambda entry: entry.tuple_of(_Node.text, 3))
    return Timings(node["source"].text(), tokens, us, stale)


def _problem(node: _Node) -> Problem:
    family = node["family"].text()
    if family not in _PROBLEMS:
        raise node["family"].error(f"is unknown: it takes {', '.join(_PROBLEMS)}")
    problem: Problem = _value(_PROBLEMS[family], node, "family", "text")
    return problem


def _value(kind: type, node: _Node, *derived: str) -> Any:
    """A value of dataclass `kind` from its fields; those with a default may be left out."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    node.allow(*derived, *fields)
    given = node.fields()
    values = {
        name: _READERS[field.type](node[name])
        for name, field in fields.items()
        if name in given or field.default is dataclasses.MISSING
    }
    return kind(**values)


def _candidate(node: _Node) -> Candidate:
    node.allow("backend", "act", "scales", "fit", "parts", "reasons")
    scales = node["scales"].text()
    return Candidate(
        backend=node["backend"].text(),
        act=node["act"].optional(lambda act: act.parsed(ActScheme)),
        reasons=node["reasons"].tuple_of(_reason),
        scales=node["scales"].parsed(Scales) if scales else "",
        fit=node["fit"].optional(lambda fit: _value(Fit, fit)),
        parts=node["parts"].tuple_of(_part),
    )


def _reason(node: _Node) -> Reason:
    node.allow("why", "text")
    return Reason(node["why"].parsed(Why), node["text"].text())


def _part(node: _Node) -> tuple[int | None, str]:
    items = list(node.items())
    if len(items) != 2:
        raise node.error("is not [largest M or null, backend]")
    return items[0].optional(_Node.integer), items[1].text()
