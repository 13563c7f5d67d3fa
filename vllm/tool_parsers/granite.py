"""`granite`: IBM Granite 3 and 4."""

from vllm.tool_parsers.json_call import JsonCalls
from vllm.tool_parsers.parser import Steps

BEGINS, END = ("<|tool_call|>", "<tool_call>"), "</tool_call>"


class Granite(JsonCalls):
    """`<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`, of Granite 4 one call at a time
    between `<tool_call>` and its end."""

    name = "granite"
    template_marks = ("<|tool_call|>",)
    keeps_special_tokens = True

    def parse(self) -> Steps:
        while (begin := (yield from self.until(*BEGINS, emit=self.content))) is not None:
            yield from self.or_content(begin, self._some)

    def _some(self) -> Steps:
        yield from self.space()
        if (yield from self.char()) == "[":
            yield from self.list_calls()
        else:
            yield from self.object_call()
        yield from self.space()
        yield from self.one_of(END, "")
        yield from self.space()
