"""Upstream's flags for the kernels decided here, as text and as JSON."""

from typing import Any

from vllm.kernels.report import json_report
from vllm.kernels.report.columns import columns
from vllm.kernels.report.report import Report
from vllm.kernels.report.upstream import Advice, Entry, Exclusion, Source, table


def page(found: Advice, width: int) -> str:
    """The flags as text: a table, contradictions, what to start with, and sources."""
    entries = [answer.entry for answer in found.answers if answer.entry is not None]
    rows: list[Entry | Exclusion] = [*entries, *(one.exclusion for one in found.excluded)]
    sources = list(dict.fromkeys(source for row in rows for source in row.sources))
    mark = {source: f" [{number}]" for number, source in enumerate(sources, 1)}
    paragraphs = [[f"Flags of {found.release} for these kernels"], _table(found, mark, width)]
    for exclusion, by in found.excluded:
        text = f"{exclusion.setting} excludes {exclusion.backend}, as here: {'; '.join(by)}"
        text += f"; {exclusion.note}" if exclusion.note else ""
        text += "".join(mark[source] for source in exclusion.sources)
        paragraphs.append(columns([text], [], width))
    remarks = [*found.contradictions, *found.overreach]
    remarks += [f"Together: {command(found)}"] * bool(found.settings)
    paragraphs += [columns([text], [], width) for text in (*remarks, table().remark)]
    notes = [
        columns([f"[{number}]", f"{source.url} ({source.grade(found.release)})"], [4], width)
        for number, source in enumerate(sources, 1)
    ]
    paragraphs.append([line for lines in notes for line in lines])
    return "\n\n".join("\n".join(lines) for lines in paragraphs if lines)


def _table(found: Advice, mark: dict[Source, str], width: int) -> list[str]:
    head = ("kernel", "layers", "serves", "flag or variable")
    rows = []
    for answer in found.answers:
        text = answer.text
        if (entry := answer.entry) is not None:
            text += "".join(f" ({fact})" for fact in facts(entry) if answer.settings)
            text += "".join(mark[source] for source in entry.sources)
        serves = f"{answer.family} {answer.format}" + ", some M" * answer.is_part
        rows.append((answer.backend, f"{len(answer.layers):>6}", serves, text))
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(3)]
    return [line for row in (head, *rows) for line in columns(row, widths, width)]


def facts(entry: Entry) -> list[str]:
    """What the sources say besides, and what they do not say."""
    return [entry.note] * bool(entry.note) + [f"inferred: {entry.inferred}"] * bool(entry.inferred)


def command(found: Advice) -> str:
    """How a server is started with all settings that do not contradict each other."""
    variables = [s for s in found.settings if not s.startswith("-")]
    flags = [s for s in found.settings if s.startswith("-")]
    return " ".join([*variables, found.release.command, *flags])


def content(report: Report, found: Advice | None) -> dict[str, Any]:
    """What `vllm kernels explain --json` prints; found: with `--for ENGINE`."""
    asked = {} if found is None else {"upstream": to_json(found)}
    return {**json_report.report(*report), **asked}


def to_json(found: Advice) -> dict[str, Any]:
    """The field `upstream` of `vllm kernels explain --json --for ENGINE`."""
    return {
        "engine": found.engine,
        "version": found.release.version,
        "answers": [
            {
                "family": answer.family,
                "format": answer.format,
                "backend": answer.backend,
                "is_part": answer.is_part,
                "layers": answer.layers,
                "settings": list(answer.settings),
                "text": answer.text,
                "facts": facts(answer.entry) if answer.entry else [],
                "sources": _sources(answer.entry),
            }
            for answer in found.answers
        ],
        "exclusions": [
            {
                "setting": exclusion.setting,
                "backend": exclusion.backend,
                "excluded_by": by,
                "note": exclusion.note,
                "sources": _sources(exclusion),
            }
            for exclusion, by in found.excluded
        ],
        "contradictions": found.contradictions,
        "overreach": found.overreach,
        "command": command(found),
    }


def _sources(row: Entry | Exclusion | None) -> list[dict[str, str]]:
    """version: the release that the source describes, `latest` for an undated page."""
    return [source._asdict() for source in row.sources] if row else []
