"""Which metrics and labels a PromQL query is about: as much of its grammar as our queries use."""

import re
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\.)*")|(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*|\$\w+)"""
    r"""|(?P<range>\[[^\]]*\])|(?P<number>\d[\w.]*)|(?P<sign>=~|!~|!=|[<>=]=|[-+*/%^<>={}(),])"""
    r"""|(?P<space>\s+)"""
)
_GROUPS = ("by", "without", "on", "ignoring", "group_left", "group_right")
_WORDS = ("and", "or", "unless", "bool", "offset")


@dataclass(frozen=True)
class Selector:
    """labels: that the query asks of this metric, in matchers or to group the result by."""

    metric: str
    labels: frozenset[str]


def selectors(query: str) -> list[Selector]:
    """ValueError for what is none of the grammar known here.

    Labels of `by` and `on` are asked of every metric of the query: ours name them for all.
    """
    tokens, position = [], 0
    while position < len(query):
        match = _TOKEN.match(query, position)
        if match is None:
            raise ValueError(f"{query}: what is {query[position:]!r}?")
        position = match.end()
        if match.lastgroup != "space":
            tokens.append((str(match.lastgroup), match[0]))
    grouping: set[str] = set()
    found: list[tuple[str, set[str]]] = []
    kept = iter([*tokens, ("end", "")])
    kind, text = next(kept)
    while kind != "end":
        following = next(kept)
        if kind == "name" and text in _GROUPS:
            if following[1] == "(":
                grouping |= set(_names_until(")", kept))
                following = next(kept)
        elif (
            kind == "name"
            and text not in _WORDS
            and following[1] != "("
            and text not in _AGGREGATES
        ):
            found.append((text, set()))
            if following[1] == "{":
                found[-1][1].update(_names_until("}", kept))
                following = next(kept)
        kind, text = following
    return [Selector(metric, frozenset(labels | grouping)) for metric, labels in found]


_AGGREGATES = ("sum", "max", "min", "avg", "count")


def _names_until(end: str, tokens) -> list[str]:
    names = []
    for kind, text in tokens:
        if text == end:
            return names
        if kind == "name":
            names.append(text)
        elif kind == "end":
            raise ValueError(f"no {end!r}")
    return names
