"""Upstream's flags in the words of a command line: obeyed, without effect, or refused.

`translated` runs before argparse, which knows our own flags alone. It takes out flags that have no
effect here, one notice for each, refuses those that would change an answer, and puts our own flags
in place of other spellings and of JSON in parts (`--hf-overrides.sliding_window 0`).
"""

import json
import re
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from vllm.entrypoints.compatibility.tables import NO_EFFECT, OBEYED, Row, by_name
from vllm.errors import ConfigError

_LEVEL = re.compile(r"-O=?(\w+)")
_NUMBER = re.compile(r"-\.?\d")


class _Flag(NamedTuple):
    """A word that is a flag. value: what stands after `=`. path: the part of a JSON value that it
    gives. is_off: written as --no-..."""

    row: Row
    value: str | None
    path: tuple[str, ...] = ()
    is_off: bool = False

    @property
    def name(self) -> str:
        return _negated(self.row.name) if self.is_off else self.row.name


def translated(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that argparse is to take, and a notice for each flag without effect.

    ConfigError for a flag whose value would change an answer.
    """
    rows = by_name("flags")
    rest, out = deque(words), list[str]()
    objects: dict[str, Any] = {}  # JSON values in parts, by flag
    notices: dict[str, str] = {}
    while rest:
        word = rest.popleft()
        flag = _flag(word, rows)
        if flag is None or _is_plain(flag):
            out.append(word)
        elif flag.path or flag.row.takes == "json":
            _put(objects, flag, _value(flag, rest))
        elif flag.row.kind == OBEYED:
            word, notices[flag.row.name] = _renamed(flag, rest)
            out.append(word)
        elif notice := judged(flag.row, _value(flag, rest), words, flag.name):
            notices[flag.row.name] = notice
    for name, value in objects.items():
        if rows[name].kind == OBEYED:
            out.append(f"{name}={_text(value)}")
            continue
        value, given = _with_flags(rows[name], value)
        out += given
        notices[name] = judged(rows[name], value, words) if value or not given else ""
    return out, [notice for notice in notices.values() if notice]


def judged(row: Row, value: Any, words: Sequence[str] = (), name: str = "") -> str:
    """The notice that a row without effect, or with a neutral value, deserves.

    value: as text, a list, or parsed JSON; True and False of a switch. words: the whole command
    line. name: as it was written. ConfigError for a value that is refused.
    """
    name = name or row.name
    if row.kind == NO_EFFECT:
        return f"{name} has no effect here: {row.why}"
    shown = name if isinstance(value, bool) or value in (None, {}) else f"{name} {_text(value)}"
    if _is_neutral(row, value, words):
        return f"{shown} has no effect here: it is the same without it"
    takes = f" (it takes {accepted})" if (accepted := accepted_values(row)) else ""
    raise ConfigError(f"{shown} is not supported{takes}. Use instead: {row.use}")


def accepted_values(row: Row) -> str:
    """Of a flag that is refused with others."""
    texts = []
    for known in row.neutral:
        if known.startswith("<="):
            texts.append(f"at most {known[2:]}")
        elif known.startswith("="):
            texts.append(f"the value of {known.split()[1]}")
        elif row.takes not in ("switch", "list"):
            texts.append(known)
    return ", ".join(texts)


def is_upstream(name: str) -> bool:
    return _flag(name, by_name("flags")) is not None


def explained(name: str) -> str:
    """What becomes of a flag of upstream's, as a line; "" for one that it lacks."""
    flag = _flag(name, by_name("flags"))
    if flag is None:
        return ""
    row = flag.row
    if row.kind == OBEYED:
        return f"{row.name} is {row.ours or row.name}.\n"
    if row.kind == NO_EFFECT:
        return f"{row.name} has no effect here: {row.why}.\n"
    takes = f" but for {accepted}" if (accepted := accepted_values(row)) else ""
    return f"{row.name} is not supported{takes}. Use instead: {row.use}.\n"


def words_of(name: str, value: Any) -> list[str] | None:
    """The words for a flag of upstream's with a value from a file; None for one that it lacks."""
    flag = _flag(name, by_name("flags"))
    if flag is None:
        return None
    if isinstance(value, bool):
        return [name if value else _negated(name)]
    if isinstance(value, list) and flag.row.takes == "list":
        return [name, *map(str, value)]
    return [f"{name}={_text(value)}"]


def _flag(word: str, rows: dict[str, Row]) -> _Flag | None:
    if level := _LEVEL.fullmatch(word):
        return _Flag(rows["-O"], level[1])
    if not word.startswith("-"):
        return None
    name, equals, text = word.partition("=")
    value = text if equals else None
    if name in rows:
        return _Flag(rows[name], value)
    base, *path = name.split(".")
    if path and base in rows:
        return _Flag(rows[base], value, tuple(path))
    positive = _negated(name)
    if name.startswith("--no-") and positive in rows:
        return _Flag(rows[positive], value, is_off=True)
    return None


def _negated(name: str) -> str:
    return f"--{name[5:]}" if name.startswith("--no-") else f"--no-{name[2:]}"


def _is_plain(flag: _Flag) -> bool:
    """Whether argparse takes the word as it is."""
    row = flag.row
    is_ours = row.kind == OBEYED and row.takes != "json"
    return is_ours and not (flag.path or row.ours or row.values)


def _renamed(flag: _Flag, rest: "deque[str]") -> tuple[str, str]:
    """Our own words for a flag, and a notice where its value is another one here."""
    name = flag.row.ours or flag.row.name
    if flag.is_off:
        name = _negated(name)
    value = flag.value
    if value is None and flag.row.takes != "switch" and rest:
        value = rest.popleft()
    if value is None:
        return name, ""
    ours = (flag.row.values or {}).get(value.lower())
    notice = f"{name} {value} means {ours} here: {flag.row.why}" if ours else ""
    return f"{name}={ours or value}", notice


def _value(flag: _Flag, rest: "deque[str]") -> Any:
    """What is given to a flag that argparse does not know; takes it out of `rest`."""
    if flag.is_off or (flag.row.takes == "switch" and not flag.path):
        return not flag.is_off and (flag.value or "true").lower() not in ("false", "0")
    if flag.value is not None:
        return flag.value
    if flag.row.takes == "list":
        return list(_following(rest))
    if not rest or _is_flag(rest[0]):
        if flag.row.takes == "optional":
            return True
        raise ConfigError(f"{flag.row.name} takes a value")
    return rest.popleft()


def _following(rest: "deque[str]") -> Iterator[str]:
    while rest and not _is_flag(rest[0]):
        yield rest.popleft()


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word.startswith("-") and not _NUMBER.match(word)


def _put(objects: dict[str, Any], flag: _Flag, value: Any) -> None:
    """Puts a value, or one part of it, into the JSON value of its flag. A key that ends in `+`
    adds to a list."""
    parsed = _parsed(value) if isinstance(value, str) else value
    if not flag.path:
        objects[flag.row.name] = parsed
        return
    place = objects.setdefault(flag.row.name, {})
    *outer, last = flag.path
    for key in outer:
        place = place.setdefault(key, {}) if isinstance(place, dict) else {}
    if not isinstance(place, dict):
        raise ConfigError(f"{flag.row.name}.{'.'.join(flag.path)}: {flag.row.name} has no keys")
    if last.endswith("+"):
        items = parsed if isinstance(parsed, list) else [_parsed(t) for t in str(value).split(",")]
        place.setdefault(last[:-1], []).extend(items)
    else:
        place[last] = parsed


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _with_flags(row: Row, value: Any) -> tuple[Any, list[str]]:
    """A JSON object without the keys that are known, and the flags that those mean."""
    if not isinstance(value, dict) or not row.keys:
        return value, []
    left = {key: one for key, one in value.items() if key not in row.keys}
    given = [
        f"{row.keys[key]}={_text(one)}"
        for key, one in value.items()
        if row.keys.get(key) and one is not None
    ]
    return left, given


def _is_neutral(row: Row, value: Any, words: Sequence[str]) -> bool:
    if row.takes == "json" and value in ({}, None, ""):
        return True
    text = _text(value).lower()
    return any(_matches(text, known, words) for known in row.neutral)


def _matches(text: str, known: str, words: Sequence[str]) -> bool:
    if known.startswith("<="):
        return text.isdigit() and int(text) <= int(known[2:])
    if known.startswith("= "):
        _, flag, *default = known.split()
        return text == (_last(flag, words) or "".join(default)).lower()
    return text == known


def _last(name: str, words: Sequence[str]) -> str:
    """The value that the command line gives to a flag last."""
    row = by_name("flags")[name]
    found = ""
    for i, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag in (row.name, *row.short):
            found = value or (words[i + 1] if i + 1 < len(words) else "")
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
