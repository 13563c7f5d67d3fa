"""What changed between two reports: layers whose kernel, reasons or problem differ."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from vllm.kernels.report.columns import columns
from vllm.kernels.report.layer_groups import compress, counted
from vllm.kernels.report.report import Report
from vllm.kernels.report.text_report import NO_KERNEL, asks, verdict
from vllm.kernels.select.decision import Decision
from vllm.utils.dataclasses import asdict, dataclass, replace


class Detail(NamedTuple):
    """before, after: "" for nothing."""

    what: str
    before: str
    after: str


@dataclass(frozen=True)
class Change:
    """Layers to which the same happened."""

    family: str
    layers: tuple[str, ...]
    title: str
    details: tuple[Detail, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "details": [detail._asdict() for detail in self.details]}


def changes(before: Report, after: Report, names: tuple[str, str]) -> list[Change]:
    """`names` are those of the two reports, for layers that only one of them has."""
    old, new = _by_layer(before), _by_layer(after)
    same_story: dict[tuple[str, str, tuple[Detail, ...]], list[str]] = {}
    for key in dict.fromkeys((*old, *new)):
        layer, family = key
        details: list[Detail] = []
        if key not in new:
            title = f"only in {names[0]}"
        elif key not in old:
            title = f"only in {names[1]}"
        else:
            details = _details(old[key], new[key])
            if not details:
                continue
            was, now = (one.chosen or NO_KERNEL for one in (old[key], new[key]))
            title = f"{now}, as before" if was == now else f"{was} -> {now}"
        same_story.setdefault((family, title, tuple(details)), []).append(layer)
    return [
        Change(family, tuple(layers), title, details)
        for (family, title, details), layers in same_story.items()
    ]


def _by_layer(report: Report) -> dict[tuple[str, str], Decision]:
    """One layer may ask for several families (attention and its cache), but once for each."""
    return {(layer, decision.problem.family): decision for layer, decision in report.records}


def _details(old: Decision, new: Decision) -> list[Detail]:
    details: list[Detail] = []
    if old.problem != new.problem:
        details.append(Detail("problem", asks(old.problem), asks(new.problem)))
    if old.origin != new.origin:
        details.append(Detail("decided by", old.origin.text, new.origin.text))
    before, after = _verdicts(old), _verdicts(new)
    if list(before) != list(after):
        details.append(Detail("order", ", ".join(before), ", ".join(after)))
    for backend in dict.fromkeys((*before, *after)):
        was, now = before.get(backend, ""), after.get(backend, "")
        if was != now:
            details.append(Detail(backend, was, now))
    return details


def _verdicts(decision: Decision) -> dict[str, str]:
    """By backend, without what follows from another being asked for: "decided by" tells that."""
    origin = decision.origin.text
    verdicts = {}
    for candidate in decision.candidates:
        own = [r for r in candidate.reasons if r.text == origin or not r.text.startswith(origin)]
        shown = verdict(replace(candidate, reasons=tuple(own)), decision)
        texts = (f"{kind}: {text}" if text else kind for kind, text in shown)
        verdicts[candidate.backend] = "; ".join(texts)
    return verdicts


def context(before: Report, after: Report) -> list[Detail]:
    """Differences in where and under what the decisions were made: (what, before, after)."""
    rows = [Detail("device", str(before.device), str(after.device))]
    for name in sorted({lib.name for lib in before.libs.libs | after.libs.libs}):
        was, now = (str(report.libs.get(name) or f"no {name}") for report in (before, after))
        rows.append(Detail("library", was, now))
    for name in sorted({*before.env, *after.env}):
        was, now = (
            f"{name}={report.env[name]}" if name in report.env else f"{name} unset"
            for report in (before, after)
        )
        rows.append(Detail("variable", was, now))
    return [row for row in rows if row.before != row.after]


def page(before: Report, after: Report, found: Iterable[Change], width: int) -> str:
    """The context, then each change with the layers it covers."""
    paragraphs = [[line for row in context(before, after) for line in _detail(row, width)]]
    for change in found:
        title = f"{counted(len(change.layers), f'{change.family} layer')}: {change.title}"
        lines = [
            line
            for pattern in compress(change.layers)
            for line in columns([pattern], [], width - 2)
        ]
        lines += [line for row in change.details for line in _detail(row, width - 2)]
        paragraphs.append([title, *(f"  {line}" for line in lines)])
    return "\n\n".join("\n".join(lines) for lines in paragraphs if lines)


def _detail(row: Detail, width: int) -> list[str]:
    what, before, after = row
    lines = []
    for sign, text in (("-", before), ("+", after)):
        if text:
            lines += columns([what, sign, text], [20, 1], width)
            what = ""
    return lines
