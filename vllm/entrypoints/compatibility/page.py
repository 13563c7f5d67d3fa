"""docs/compatibility.md, written from the tables: `vllm kernels docs`."""

from collections.abc import Iterable, Sequence

from vllm.entrypoints.compatibility.flags import accepted_values
from vllm.entrypoints.compatibility.tables import KINDS, NO_EFFECT, OBEYED, TABLES, Row, table

_HEAD = """
# Compatibility with upstream's vLLM

This file is written by `vllm kernels docs` from `vllm/entrypoints/compatibility/*.json`; do not
edit it. It lists the names of vLLM {upstream}, by its published documentation, and what they mean
here. A test checks every row against the running code.

| kind | meaning |
|---|---|
| obeyed | it means here what it means upstream |
| no effect | it is accepted, and a notice at the start says why it changes nothing here |
| refused | it would change an answer and is not supported; the error says what to use instead |

`python -m vllm.entrypoints.openai.api_server` is `vllm serve`. With `--help=NAME` that tells of
one flag, upstream's too, or of one group of flags.
"""

_FLAGS = """
## Flags of `vllm serve`

Words are as upstream's: `--max_model_len` is `--max-model-len`, a switch has a `--no-` form, whole
numbers take `32k` (32,000), `32K` (32,768) and `1.5G`, a JSON value is given whole or in parts
(`--hf-overrides.rope_parameters.factor 4`; `+` at the end of a key adds to a list). A file of
`--config` takes the same names. A refused flag stops the start, but for the values in its row.
"""

_VARIABLES = """
## Environment variables

A variable that is set and has no effect is told at the start. Names that end in `*` stand for all
that begin so.
"""

_FIELDS = """
## Fields of requests

A field without effect is accepted; a refused one is answered with status 400 that names it.
"""

_ENDPOINTS = """
## Endpoints

A refused endpoint is answered with status 404.
"""

_LIBRARY = """
## Library names

`module:name`. A refused name cannot be imported.
"""

_METRICS = """
## Metrics

Names of `GET /metrics`. One of no effect or refused is not exported.
"""


def document() -> str:
    """The whole file."""
    sections = (
        _HEAD.format(upstream=table("flags").upstream),
        _FLAGS,
        *_by_group("flags"),
        _VARIABLES,
        _plain("variables"),
        _FIELDS,
        *_by_group("fields"),
        _ENDPOINTS,
        _plain("endpoints"),
        _LIBRARY,
        _plain("library"),
        _METRICS,
        _plain("metrics"),
        _sources(),
    )
    return "\n\n".join(section.strip() for section in sections) + "\n"


def counts(name: str) -> dict[str, int]:
    """Rows of a table by kind."""
    return {kind: sum(row.kind == kind for row in table(name).rows) for kind in KINDS}


def _by_group(name: str) -> Iterable[str]:
    rows = table(name).rows
    yield _counted(name)
    for group in dict.fromkeys(row.group for row in rows):
        yield f"### {f'`{group}`' if group.startswith('/') else group}"
        yield _rows(row for row in rows if row.group == group)


def _plain(name: str) -> str:
    return f"{_counted(name)}\n\n{_rows(table(name).rows)}"


def _rows(rows: Iterable[Row]) -> str:
    """One line for all names of which the same is said."""
    said: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        names = [f"`{name}`" for name in (row.name, *row.short)]
        said.setdefault((row.kind, _here(row)), []).extend(names)
    lines = ((", ".join(names), kind, here) for (kind, here), names in said.items())
    return _markdown(("name", "kind", "here"), lines)


def _counted(name: str) -> str:
    found = counts(name)
    return ", ".join(f"{number} {kind}" for kind, number in found.items() if number) + "."


def _here(row: Row) -> str:
    if row.kind == OBEYED:
        named = f"`{row.ours}`" if row.ours and row.ours != row.name else ""
        values = ", ".join(
            f"`{upstream}` is `{ours}`" for upstream, ours in (row.values or {}).items()
        )
        return "; ".join(filter(None, (named, values, row.why)))
    parts = [f"{key} is `{flag}`" for key, flag in (row.keys or {}).items() if flag]
    if row.kind == NO_EFFECT:
        return "; ".join((row.why, *parts))
    if accepted := accepted_values(row):
        parts.append(f"no effect with {accepted}")
    if quiet := [key for key, flag in (row.keys or {}).items() if not flag]:
        parts.append(f"no effect with {', '.join(quiet)}")
    return "; ".join((f"instead: {row.use}", *parts))


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


def _sources() -> str:
    urls = dict.fromkeys(url for name in TABLES for url in table(name).sources)
    return "## Sources\n\n" + "\n".join(f"- <{url}>" for url in urls)
