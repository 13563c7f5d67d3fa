"""`hermes`: Hermes 2 and 3, Qwen2.5, Qwen3 and models that follow them."""

from vllm.tool_parsers.json_call import JsonCalls
from vllm.tool_parsers.parser import Steps

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes(JsonCalls):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once per call."""

    name = "hermes"
    template_marks = (BEGIN,)
    grammar = "qwen_3"

    def parse(self) -> Steps:
        yield from self.calls_between(BEGIN, self._one)

    def _one(self) -> Steps:
        yield from self.space()
        yield from self.object_call()
        yield from self.space()
        yield from self.one_of(END, "")
        yield from self.space()
