"""Tells what a model writes for itself from its answer."""

from dataclasses import dataclass

from vllm.tool_parsers.parser import Parser, Steps


@dataclass(frozen=True)
class ReasoningFormat:
    """begins: marks before the reasoning, of which models write one or none; end: the mark after
    it. is_open: whether an answer begins with reasoning although neither it nor the prompt has a
    mark before it. keeps_special_tokens: whether the marks are special tokens."""

    name: str
    begins: tuple[str, ...] = ("<think>",)
    end: str = "</think>"
    is_open: bool = False
    keeps_special_tokens: bool = False

    def is_open_after(self, prompt: str) -> bool | None:
        """Whether the answer to `prompt` begins within reasoning; None where it may."""
        if prompt.rstrip().endswith(self.begins):
            return True
        if prompt.rstrip().endswith(self.end):
            return False
        return True if self.is_open else None


class ReasoningParser(Parser):
    """Reasoning, then content. is_open: whether the answer begins within reasoning; None where a
    mark tells."""

    def __init__(self, form: ReasoningFormat, is_open: bool | None):
        self._form, self._is_open = form, is_open
        super().__init__()

    def parse(self) -> Steps:
        form = self._form
        if self._is_open is False:
            return
        space = yield from self.space()
        begin = yield from self.one_of(*form.begins, "")
        if begin or self._is_open:
            yield from self.until(form.end, emit=self.reasoning)
            yield from self.space()
        else:
            self.content(space)
