"""`glm45`: GLM-4.5, 4.6 and 4.7."""

from collections.abc import Generator

from vllm.tool_parsers.parser import NotACall, Steps, TaggedArguments

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


class Glm45(TaggedArguments):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>TEXT</arg_value>...</tool_call>`."""

    name = "glm45"
    template_marks = (KEY, VALUE)
    grammar = "glm_4_7"
    keeps_special_tokens = True

    def parse(self) -> Steps:
        yield from self.calls_between(BEGIN, self._one)

    def _one(self) -> Steps:
        parts = list[str]()
        mark = yield from self.until(KEY, END, emit=parts.append)
        name = "".join(parts).strip()
        if mark is None or not name or "\n" in name:
            raise NotACall
        self._is_key_read = mark == KEY
        self._is_closed = mark == END
        yield from self.arguments(name, self._argument)
        yield from self.space()
        if not self._is_closed:
            yield from self.one_of(END, "")
        yield from self.space()

    def _argument(self) -> Generator[None, None, tuple[str, str] | None]:
        if self._is_closed:
            return None
        if not self._is_key_read:
            yield from self.space()
            if not (yield from self.one_of(KEY, "")):
                return None
        self._is_key_read = False
        key, parts = (yield from self.name_before(KEY_END)), list[str]()
        yield from self.space()
        yield from self.one_of(VALUE)
        yield from self.until(VALUE_END, emit=parts.append)
        return key, "".join(parts)
