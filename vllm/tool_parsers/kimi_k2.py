"""`kimi_k2`: Kimi K2."""

from vllm.tool_parsers.parser import Parser, Steps

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"


class KimiK2(Parser):
    """`functions.NAME:INDEX`, which is the id too, and the JSON of the arguments."""

    name = "kimi_k2"
    template_marks = (BEGIN,)
    grammar = "kimi"
    keeps_special_tokens = True
    _id = ""

    def call_id(self, name: str) -> str:
        return self._id or super().call_id(name)

    def parse(self) -> Steps:
        while (
            mark := (yield from self.until(BEGIN, CALL_BEGIN, END, emit=self.content))
        ) is not None:
            if mark == CALL_BEGIN:
                yield from self.or_content(mark, self._one)
            yield from self.space()

    def _one(self) -> Steps:
        self._id = yield from self.name_before(ARGUMENTS)
        name, _, index = self._id.removeprefix("functions.").rpartition(":")
        yield from self.space()
        yield from self.json_text(self.call(name or index))
        yield from self.space()
        yield from self.one_of(CALL_END, "")
