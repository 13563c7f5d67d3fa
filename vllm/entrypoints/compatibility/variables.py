"""Upstream's environment variables that have no effect here."""

from fnmatch import fnmatchcase

from vllm.entrypoints.compatibility.tables import NO_EFFECT, Row, table


def row_of(name: str) -> Row | None:
    """The row of a variable; names in the table may end in `*`."""
    return next((row for row in table("variables").rows if fnmatchcase(name, row.name)), None)


def notice_of(name: str) -> str | None:
    """Why a variable that is set has no effect; None for one that upstream lacks."""
    row = row_of(name)
    if row is None or row.kind != NO_EFFECT:
        return None
    return f"{name} has no effect here: {row.why}"
