"""`pythonic` and `llama4_pythonic`: calls as a Python list, of Llama 3.2 and Llama 4."""

import ast
from typing import Any

from vllm.tool_parsers.parser import NotACall, Parser, Steps, json_of

BEGIN, END = "<|python_start|>", "<|python_end|>"


class Pythonic(Parser):
    """`[name(key=value, ...), ...]`, which is the whole answer; otherwise it is all content."""

    name = "pythonic"

    def parse(self) -> Steps:
        yield from self.list_or_content()

    def list_or_content(self) -> Steps:
        space = yield from self.space()
        if (yield from self.char()) != "[":
            self.content(space)
            yield from self.until(emit=self.content)
            return
        parts: list[str] = []
        yield from self.until(END, emit=parts.append)
        text = "".join(parts)
        names = {tool.name for tool in self.tools}
        try:
            calls = _calls(text)
        except NotACall:
            calls = []
        if not calls or not names.issuperset(name for name, _ in calls):
            self.content(text)
            return
        for name, arguments in calls:
            self.call(name)(json_of(arguments))


class Llama4Pythonic(Pythonic):
    """The same, between `<|python_start|>` and `<|python_end|>` or without them."""

    name = "llama4_pythonic"
    template_marks = (BEGIN,)
    keeps_special_tokens = True

    def parse(self) -> Steps:
        space = yield from self.space()
        if not (yield from self.one_of(BEGIN, "")):
            self.unread(space)
        yield from self.list_or_content()


def _calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """NotACall for what is no list of calls with keywords of literals."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            raise NotACall
        return [_call(one) for one in tree.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise NotACall from None


def _call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call) or node.args or any(one.arg is None for one in node.keywords):
        raise NotACall
    values = {str(one.arg): ast.literal_eval(one.value) for one in node.keywords}
    json_of(values)  # TypeError or ValueError for what JSON does not have
    return ast.unparse(node.func), values
