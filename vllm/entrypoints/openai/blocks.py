"""An answer as a row of blocks: reasoning, text and calls, in the order in which they come.

Both OpenAI's Responses and Anthropic's Messages show an answer so, each in its own words.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm.tool_parsers.parser import Arguments, Call, Content, Event

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """index: its place in the answer. call_id, name: of a call. parts: of its text, or of the JSON
    of a call's arguments. logprobs: entries of a chat's `logprobs.content`. id: for the client."""

    kind: Kind
    index: int
    call_id: str = ""
    name: str = ""
    id: str = ""
    parts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)


@dataclass(slots=True)
class Begin:
    block: Block


@dataclass(slots=True)
class Delta:
    """More of a block; logprobs: of its tokens, where the request asks for them."""

    block: Block
    text: str
    logprobs: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class End:
    block: Block


Step = Begin | Delta | End


@dataclass
class Blocks:
    """keeps_space: whether white space alone is text too; else what a model writes between its
    reasoning and its calls is none."""

    keeps_space: bool
    found: list[Block] = field(default_factory=list)
    _open: Block | None = None
    _calls: dict[int, Block] = field(default_factory=dict)
    _space: str = ""

    def add(self, events: Iterable[Event]) -> list[Step]:
        """What these events of the answer change."""
        steps: list[Step] = []
        for event in events:
            if isinstance(event, Arguments):
                block = self._calls[event.index]
                block.parts.append(event.text)
                steps.append(Delta(block, event.text))
            elif isinstance(event, Call):
                steps += self._begin("call", event.id, event.name)
                self._calls[event.index] = self.found[-1]
            elif isinstance(event, Content):
                steps += self._content(event.text)
            else:
                steps += self._text("reasoning", event.text)
        return steps

    def end(self, needs_text: bool = False) -> list[Step]:
        """After the last event. needs_text: whether an answer without calls has a text, be it
        empty."""
        steps = [] if self.found or not self._space else [*self._text("text", self._space)]
        if needs_text and all(block.kind == "reasoning" for block in self.found):
            steps += self._begin("text")
        return [*steps, *self._close()]

    def _content(self, text: str) -> Iterator[Step]:
        if self._open is None or self._open.kind != "text":
            text = self._space + text
            if not self.keeps_space and text.isspace():
                self._space = text
                return
        yield from self._text("text", text)

    def _text(self, kind: Kind, text: str) -> Iterator[Step]:
        block = self._open
        if block is None or block.kind != kind:
            yield from self._begin(kind)
            block = self.found[-1]
        block.parts.append(text)
        yield Delta(block, text)

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[Step]:
        yield from self._close()
        self._space = ""
        self._open = Block(kind, len(self.found), call_id, name)
        self.found.append(self._open)
        yield Begin(self._open)

    def _close(self) -> Iterator[Step]:
        if self._open is not None:
            yield End(self._open)
            self._open = None
