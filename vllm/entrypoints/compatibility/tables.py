"""The tables of upstream's names."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from vllm.utils.dataclasses import dataclass

OBEYED, NO_EFFECT, REFUSED = "obeyed", "no effect", "refused"
KINDS = (OBEYED, NO_EFFECT, REFUSED)
TABLES = ("flags", "variables", "fields", "endpoints", "library", "metrics")


@dataclass(frozen=True)
class Row:
    """One name of upstream's.

    kind: of KINDS. group: where upstream lists it. ours: our name for it, where it is another one.
    why: of `no effect`, or what differs where obeyed. use: of `refused`, and the better name of
    others.

    Of flags and variables: neutral: values of a refused one that change nothing (`<=N`; `= FLAG
    DEFAULT`: what another flag has). Of flags: short: other spellings. takes: value, switch, list,
    json, or optional for a value that may be missing. values: our words for values. keys: of a JSON
    object, each with the flag that it means, or "" for one without effect.
    """

    name: str
    kind: str
    group: str = ""
    ours: str = ""
    why: str = ""
    use: str = ""
    short: tuple[str, ...] = ()
    takes: str = "value"
    values: Mapping[str, str] | None = None
    neutral: tuple[str, ...] = ()
    keys: Mapping[str, str] | None = None
    example: Any = True


@dataclass(frozen=True)
class Table:
    """upstream: the release whose interface it is. sources: pages that the names are from."""

    upstream: str
    sources: tuple[str, ...]
    rows: tuple[Row, ...]


@cache
def table(name: str) -> Table:
    """One of TABLES."""
    text = Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8")
    content = json.loads(text)
    rows = tuple(Row(**_tuples(row)) for row in content["rows"])
    return Table(content["upstream"], tuple(content["sources"]), rows)


@cache
def by_name(name: str) -> dict[str, Row]:
    """The rows of one of TABLES by their names and other spellings."""
    return {known: row for row in table(name).rows for known in (row.name, *row.short)}


def _tuples(row: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(one) if isinstance(one, list) else one for key, one in row.items()}
