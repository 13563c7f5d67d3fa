"""Flags and variables that make upstream's current vLLM and SGLang take the kernels decided here.

They are data, `upstream_flags.json`: what upstream's documentation, or a thread of its
repositories, says. Each entry names the release that its sources describe, and is inferred where
that is another than the current one. The file is read when an answer is asked for.
"""

import json
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from vllm.kernels.report.layer_groups import by_decision
from vllm.kernels.report.text_report import NO_KERNEL
from vllm.kernels.select.decision import Decision, Record
from vllm.kernels.select.reason import Why
from vllm.machine import Device
from vllm.utils.dataclasses import dataclass

ENGINES = ("vllm", "sglang")
_TABLE = Path(__file__).with_name("upstream_flags.json")

# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class Release:
    """The current release of an engine, and what starts its server."""

    name: str
    version: str
    command: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


class Source(NamedTuple):
    """version: the release that the page or thread describes, or the month of a thread that names
    none; `latest`: an undated page."""

    url: str
    version: str

    def grade(self, release: Release) -> str:
        """How far it carries for the current release."""
        if self.version == release.version:
            return "documented"
        known = "undated" if self.version == "latest" else f"of {self.version}"
        return f"{known}; inferred for {release.version}"


@dataclass(frozen=True)
class Entry:
    """What makes an engine serve layers of `family` by its kernel of our `backend`.

    formats: patterns of names. scales: forms of scales that the kernel takes, () for any. settings:
    a flag or variable that chooses it, then those that go with it; () where none does, and
    `instead` is what upstream does. chips: names or families that the sources limit it to, () for
    any. note: what they say besides. inferred: what they do not say.
    """

    engine: str
    family: str
    backend: str
    formats: tuple[str, ...]
    sources: tuple[Source, ...]
    settings: tuple[str, ...] = ()
    instead: str = ""
    scales: tuple[str, ...] = ()
    chips: tuple[str, ...] = ()
    note: str = ""
    inferred: str = ""

    def is_of(self, family: str, weight_format: str) -> bool:
        patterns = self.formats
        return self.family == family and any(fnmatchcase(weight_format, p) for p in patterns)

    def is_for(self, device: Device) -> bool:
        return not self.chips or device.family in self.chips or device.arch in self.chips


@dataclass(frozen=True)
class Exclusion:
    """What keeps the kernels of `backend` from every layer."""

    engine: str
    backend: str
    setting: str
    sources: tuple[Source, ...]
    note: str = ""


@dataclass(frozen=True)
class PerFormat:
    """What separates weight formats under the flag `name`."""

    engine: str
    name: str
    text: str
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Table:
    """remark: what holds for every flag."""

    engines: dict[str, Release]
    entries: tuple[Entry, ...]
    exclusions: tuple[Exclusion, ...]
    per_format: tuple[PerFormat, ...]
    remark: str


@cache
def table() -> Table:
    content = json.loads(_TABLE.read_text(encoding="utf-8"))
    sources = {name: Source(**source) for name, source in content["sources"].items()}

    def rows(kind: type, name: str) -> tuple[Any, ...]:
        return tuple(kind(**_tuples({**row, "sources": [sources[one] for one in row["sources"]]}))
                     for row in content[name])  # fmt: skip

    return Table(
        {name: Release(**release) for name, release in content["engines"].items()},
        rows(Entry, "entries"),
        rows(Exclusion, "exclusions"),
        rows(PerFormat, "per_format"),
        content["remark"],
    )


def _tuples(row: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(one) if isinstance(one, list) else one for key, one in row.items()}


def name_of(setting: str) -> str:
    """`--flag` of `--flag value`, `NAME` of `NAME=value`."""
    return setting.partition(" " if setting.startswith("-") else "=")[0]


# ---------------------------------------------------------------- what it says of decisions


class Answer(NamedTuple):
    """What chooses `backend` for these layers: settings, () for nothing, with the reason as `text`.
    entry: what says so, None where nothing is documented. is_part: it serves some M of each of the
    layers, other kernels the rest."""

    family: str
    format: str
    backend: str
    is_part: bool
    settings: tuple[str, ...]
    text: str
    entry: Entry | None
    layers: list[str]


class Excluded(NamedTuple):
    """An exclusion that does what `by`, flags, variables and rules, does here."""

    exclusion: Exclusion
    by: list[str]


@dataclass(frozen=True)
class Advice:
    """answers: of distinct kernels. contradictions: settings that cannot hold together. overreach:
    settings that also decide what other kernels serve here. settings: those that do not contradict
    each other."""

    engine: str
    answers: list[Answer]
    excluded: list[Excluded]
    contradictions: list[str]
    overreach: list[str]
    settings: list[str]

    @property
    def release(self) -> Release:
        return table().engines[self.engine]


def advice(records: Iterable[Record], engine: str) -> Advice:
    """What makes `engine` (of ENGINES) take the kernels of these decisions, if anything does."""
    decisions = by_decision(records)
    found: dict[tuple[Any, ...], Answer] = {}
    for decision, layers in decisions.items():
        for answer in _answers(decision, engine):
            found.setdefault(answer[:-1], answer).layers.extend(layers)
    answers = list(found.values())
    contradictions, apart = _contradictions(answers, engine)
    agreed = [answer for answer in answers if answer not in apart]
    settings = dict.fromkeys(setting for answer in agreed for setting in answer.settings)
    excluded = []
    for exclusion in table().exclusions:
        by = _excluded_by(decisions, exclusion.backend) if exclusion.engine == engine else []
        if not by:
            continue
        excluded.append(Excluded(exclusion, by))
        if any(answer.backend == exclusion.backend for answer in answers):
            contradictions.append(
                f"{exclusion.setting} excludes {exclusion.backend} from all layers, and here it "
                "serves some"
            )
        else:
            settings = {exclusion.setting: None, **settings}
    kept = list(settings)
    return Advice(
        engine, answers, excluded, contradictions, _overreach(answers, kept, engine), kept
    )


def _answers(decision: Decision, engine: str) -> Iterator[Answer]:
    """One of each kernel of the decision, without layers."""
    family, weight_format = decision.problem.family, decision.problem.format
    if decision.chosen is None:
        text = "no kernel serves these layers here"
        yield Answer(family, weight_format, NO_KERNEL, False, (), text, None, [])
        return
    names = list(dict.fromkeys(name for _, name in decision.parts))
    is_part = len(names) > 1
    for name in names:
        entry = None if decision.is_emulated else _entry_of(engine, decision, name)
        missing = _missing(entry, engine, decision, name)
        settings = () if missing or entry is None else entry.settings
        text = missing or " with ".join(settings)
        shown = name if is_part else decision.kernel or name
        yield Answer(family, weight_format, shown, is_part, settings, text, entry, [])


def _entry_of(engine: str, decision: Decision, backend: str) -> Entry | None:
    problem = decision.problem
    scales = next(c.scales for c in decision.candidates if c.backend == backend)
    own = (
        entry
        for entry in table().entries
        if (entry.engine, entry.backend) == (engine, backend)
        and entry.is_of(problem.family, problem.format)
        and (not entry.scales or scales in entry.scales)
    )
    return next(own, None)


def _missing(entry: Entry | None, engine: str, decision: Decision, backend: str) -> str:
    """That nothing chooses the backend for this decision, and why; "" where something does."""
    problem, device = decision.problem, decision.device
    release = table().engines[engine]
    text = f"no flag in {release} chooses {backend} for {problem.family} {problem.format}"
    if decision.is_emulated:
        return f"{text}: it is emulated here"
    if entry is None:
        return f"{text}, as far as is documented"
    if not entry.settings:
        return f"{text}: {entry.instead}"
    if not entry.is_for(device):
        setting, chips = " with ".join(entry.settings), ", ".join(entry.chips)
        return f"{text} on {device}: {setting} is documented for {chips} only"
    return ""


def _excluded_by(decisions: Iterable[Decision], backend: str) -> list[str]:
    """The flags, variables and rules that alone keep the backend from layers; whether its library
    is installed here does not matter."""
    texts: dict[str, None] = {}
    for decision in decisions:
        for candidate in decision.candidates:
            reasons = candidate.reasons if candidate.backend == backend else ()
            if all(reason.origin or reason.why is Why.LIBRARY for reason in reasons):
                texts |= dict.fromkeys(reason.origin.text for reason in reasons if reason.origin)
    return list(texts)


def _contradictions(answers: list[Answer], engine: str) -> tuple[list[str], list[Answer]]:
    """A text for each set of settings of which one would decide what another is to decide, and the
    answers that have such settings."""
    texts: dict[tuple[str, ...], str] = {}
    apart: list[Answer] = []
    for name in dict.fromkeys(name_of(s) for answer in answers for s in answer.settings):
        meant = [a for a in answers if a.settings and _speaks_of(engine, name, a)]
        if len({next((s for s in a.settings if name_of(s) == name), "") for a in meant}) == 1:
            continue
        apart += meant
        families = list(dict.fromkeys(answer.family for answer in meant))
        differs_by_format = len({answer.format for answer in meant}) > 1
        by = ["kind of layer"] * (len(families) > 1)
        by += ["weight format"] * differs_by_format
        by += ["number of tokens M"] * any(answer.is_part for answer in meant)
        settings = tuple(dict.fromkeys(answer.text for answer in meant))
        text = (
            f"{', '.join(settings)} contradict each other: {table().engines[engine]} takes one "
            f"for all {' and '.join(families)} layers, and here these differ by "
            f"{' and '.join(by) or 'size'}"
        )
        for row in table().per_format:
            if differs_by_format and (row.engine, row.name) == (engine, name):
                text += f"; {row.text} ({', '.join(source.url for source in row.sources)})"
        texts.setdefault(settings, text)
    return list(texts.values()), apart


def _overreach(answers: list[Answer], settings: list[str], engine: str) -> list[str]:
    """A text per setting that also speaks of what kernels without a setting serve."""
    texts = []
    for setting in settings:
        others = dict.fromkeys(
            f"{a.backend} ({a.family} {a.format}{' for some M' * a.is_part})"
            for a in answers
            if not a.settings and _speaks_of(engine, name_of(setting), a)
        )
        if others:
            text = f"{setting} also decides where other kernels serve here: {', '.join(others)}"
            texts.append(text)
    return texts


def _speaks_of(engine: str, name: str, answer: Answer) -> bool:
    """Whether the flag or variable decides about the answer's layers: it chooses their kernel, or
    goes with the setting that does."""
    for entry in table().entries:
        if entry.engine == engine and entry.is_of(answer.family, answer.format):
            first, *others = map(name_of, entry.settings or ("",))
            if first == name or (name in others and entry.settings[:1] == answer.settings[:1]):
                return True
    return False
