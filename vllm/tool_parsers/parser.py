"""Reads an answer as it grows: plain text, reasoning, and calls of tools.

A parser is a generator over text that arrives in pieces. It yields where it needs more, so that an
answer gives the same events however it is cut.
"""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from uuid import uuid4

from vllm.tool_parsers.schemas import Tool


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the model for itself."""

    text: str


@dataclass(frozen=True)
class Call:
    """A call begins; index: its place among the calls of the answer, from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the JSON object with the arguments of call `index`."""

    index: int
    text: str


Event = Content | Reasoning | Call | Arguments
Steps = Generator[None, None, Any]
Emit = Callable[[str], None]


_MAX_NAME = 256
_MAX_PIECE = 1024  # characters


class NotACall(Exception):
    """What looked like a call is none; its text is content."""


@dataclass
class Parser:
    """name: of --tool-call-parser. template_marks: texts of which chat templates of such models
    have all. grammar: the model's key in xgrammar's structural tags, "" where it has none.
    keeps_special_tokens: whether its marks are special tokens, which answers lack otherwise.
    tells_calls_by_name: whether nothing but the name tells a call from other text of that form.
    tools: those that the request offers.
    """

    tools: Sequence[Tool] = ()
    _text: str = field(default="", init=False)
    _is_last: bool = field(default=False, init=False)
    _taken: list[str] = field(default_factory=list, init=False)
    _num_calls: int = field(default=0, init=False)
    _events: list[Event] = field(default_factory=list, init=False)

    name: ClassVar[str] = ""
    template_marks: ClassVar[tuple[str, ...]] = ()
    grammar: ClassVar[str] = ""
    keeps_special_tokens: ClassVar[bool] = False
    tells_calls_by_name: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._steps = self._run()
        next(self._steps)

    def parse(self) -> Steps:
        """Reads the whole answer."""
        raise NotImplementedError

    def feed(self, text: str, is_last: bool = False) -> list[Event]:
        """What this piece of the answer completes; is_last: no more follows."""
        # In pieces, because each step copies and searches all that is not read yet.
        for at in range(0, len(text), _MAX_PIECE):
            self._text += text[at : at + _MAX_PIECE]
            self._is_last = is_last and at + _MAX_PIECE >= len(text)
            next(self._steps)
        if is_last and not text:
            self._is_last = True
            next(self._steps)
        events, self._events = self._events, []
        return events

    def call_id(self, name: str) -> str:
        return f"call_{uuid4().hex[:24]}"

    # ------------------------------------------------------------ what is found

    def content(self, text: str) -> None:
        if text:
            self._events.append(Content(text))

    def reasoning(self, text: str) -> None:
        if text:
            self._events.append(Reasoning(text))

    def call(self, name: str) -> Emit:
        """Begins a call; the result takes its arguments. NotACall for a name of no tool where only
        names tell calls from other text."""
        if self.tells_calls_by_name and all(tool.name != name for tool in self.tools):
            raise NotACall
        index = self._num_calls
        self._num_calls += 1
        self._events.append(Call(index, self.call_id(name), _encodable(name)))

        def arguments(text: str) -> None:
            if text:
                self._events.append(Arguments(index, _encodable(text)))

        return arguments

    # ------------------------------------------------------------ reading

    def _run(self) -> Steps:
        yield
        yield from self.parse()
        while True:  # text after the end of all that a parser expects
            self.content(self._take(len(self._text)))
            yield

    def calls_between(self, begin: str, one: Callable[[], Steps]) -> Steps:
        """Content, and after each `begin` a call that `one` reads. What is no call is content."""
        while (yield from self.until(begin, emit=self.content)) is not None:
            yield from self.or_content(begin, one)

    def or_content(self, begin: str, one: Callable[[], Steps]) -> Steps:
        """A call after `begin`, which was read. Whether it is one."""
        self._taken, num_calls = [], self._num_calls
        try:
            yield from one()
        except NotACall:
            if self._num_calls == num_calls:
                self.content(begin + "".join(self._taken))
                return False
        return True

    def until(self, *marks: str, emit: Emit) -> Generator[None, None, str | None]:
        """Reads to the end of the first of `marks`, and gives what is before it to `emit`: None
        where the answer ends first."""
        while True:
            found = [(at, mark) for mark in marks if (at := self._text.find(mark)) >= 0]
            num_safe = len(self._text) if self._is_last else self._num_safe(marks)
            if found and min(found)[0] <= num_safe:
                at, mark = min(found)
                emit(self._take(at))
                self._take(len(mark))
                return mark
            if not found:
                emit(self._take(num_safe))
                if self._is_last:
                    return None
            yield

    def _num_safe(self, marks: Sequence[str]) -> int:
        """Characters of the text that are before any possible beginning of one of `marks`."""
        text, longest = self._text, max(map(len, marks), default=0)
        firsts = {mark[0] for mark in marks}
        for at in range(max(0, len(text) - longest + 1), len(text)):
            if text[at] in firsts and any(mark.startswith(text[at:]) for mark in marks):
                return at
        return len(text)

    def one_of(self, *options: str) -> Generator[None, None, str]:
        """Reads the one of `options` that comes next, "" may be one of them. NotACall for none."""
        while True:
            fitting = [one for one in options if self._text.startswith(one)]
            may_come = any(
                len(one) > len(self._text) and one.startswith(self._text) for one in options
            )
            if self._is_last or not may_come:
                if not fitting:
                    raise NotACall
                return self._take(len(max(fitting, key=len)))
            yield

    def space(self) -> Generator[None, None, str]:
        """Reads white space."""
        found = ""
        while True:
            rest = self._text.lstrip()
            found += self._take(len(self._text) - len(rest))
            if rest or self._is_last:
                return found
            yield

    def name_before(self, mark: str) -> Generator[None, None, str]:
        """Reads a name and the mark after it. NotACall where neither comes."""
        while (at := self._text.find(mark)) < 0:
            if self._is_last or len(self._text) >= _MAX_NAME + len(mark):
                raise NotACall
            yield
        name = self._text[:at].strip()
        if not name or at > _MAX_NAME or "\n" in name:
            raise NotACall
        self._take(at + len(mark))
        return name

    def char(self) -> Generator[None, None, str]:
        """The next character, which is not read yet; "" at the end of the answer."""
        while not self._text and not self._is_last:
            yield
        return self._text[:1]

    def json_text(self, emit: Emit) -> Steps:
        """Reads one JSON value and gives its text to `emit` as it comes. NotACall where none
        begins; a value that the answer ends in is given as far as it goes."""
        first = yield from self.char()
        if not first or first not in '{["-0123456789tfn':
            raise NotACall
        is_nested, depth, in_string, is_escaped = first in '{["', 0, False, False
        while True:
            for at, char in enumerate(self._text):
                if in_string:
                    if is_escaped:
                        is_escaped = False
                    elif char == "\\":
                        is_escaped = True
                    elif char == '"':
                        in_string = False
                elif char == '"':
                    in_string = True
                elif char in "{[":
                    depth += 1
                elif char in "}]":
                    depth -= 1
                if is_nested and depth <= 0 and not in_string:
                    emit(self._take(at + 1))
                    return
                if not is_nested and (char in ",}]" or char.isspace()):
                    emit(self._take(at))
                    return
            emit(self._take(len(self._text)))
            if self._is_last:
                return
            yield

    def json_value(self) -> Generator[None, None, Any]:
        """Reads one JSON value whole. NotACall for what is none."""
        parts: list[str] = []
        yield from self.json_text(parts.append)
        try:
            return json.loads("".join(parts))
        except (ValueError, RecursionError):
            raise NotACall from None

    def unread(self, text: str) -> None:
        """Puts back what was read last."""
        self._text = text + self._text
        self._taken[-1] = self._taken[-1].removesuffix(text)

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        self._taken.append(taken)
        return taken


def json_of(value: Any) -> str:
    """JSON that any reader takes: ValueError for infinities and NaN."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _encodable(text: str) -> str:
    """Escapes for half a character may be written as JSON and Python, but no UTF-8 has it."""
    return text.encode("utf-8", "replace").decode()


def typed(value: str, tool: Tool | None, name: str) -> Any:
    """What `value`, written as text, is by the schema of parameter `name`: text where the schema
    allows one or says nothing, else what it is as JSON, or text where it is none. White space
    around one of the values that the schema lists is none of it."""
    schema = _schema_of(tool.parameters if tool else None, name)
    kinds, stripped = _types_of(schema), value.strip()
    if stripped == "null" and "null" in kinds:
        return None
    if "string" in kinds or not kinds:
        is_listed = isinstance(schema, Mapping) and stripped in _listed(schema)
        return stripped if is_listed else value
    try:
        found = json.loads(value)
        json_of(found)
        return found
    except (ValueError, RecursionError):
        lowered = stripped.lower()
        return lowered == "true" if lowered in ("true", "false") and "boolean" in kinds else value


def _schema_of(schema: Any, name: str) -> Any:
    """None where the schema of the arguments does not have parameter `name`."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(name) if isinstance(properties, Mapping) else None


def _listed(schema: Mapping[str, Any]) -> Sequence[Any]:
    values = schema.get("enum")
    return values if isinstance(values, list) else [schema.get("const")]


def _types_of(schema: Any) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given})
    if isinstance(given, Sequence):
        return frozenset(one for one in given if isinstance(one, str))
    if "enum" in schema or "const" in schema:
        return frozenset("string" if isinstance(one, str) else "other" for one in _listed(schema))
    for combining in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(combining), Sequence):
            return frozenset(kind for part in parts for kind in _types_of(part))
    return frozenset({"object"}) if "properties" in schema or "$ref" in schema else frozenset()


class TaggedArguments(Parser):
    """A parser of calls whose arguments are written one by one between tags."""

    def tool(self, name: str) -> Tool | None:
        return next((tool for tool in self.tools if tool.name == name), None)

    def arguments(
        self, name: str, next_one: Callable[[], Generator[None, None, tuple[str, str] | None]]
    ) -> Steps:
        """Call `name` with the arguments (name, text) that `next_one` reads until None."""
        tool, emit = self.tool(name), self.call(name)
        opening = "{"
        while (found := (yield from next_one())) is not None:
            key, text = found
            emit(f"{opening}{json_of(key)}: {json_of(typed(text, tool, key))}")
            opening = ", "
        emit("{}" if opening == "{" else "}")
