"""`phi4_mini_json`: Phi-4-mini."""

from vllm.tool_parsers.json_call import JsonCalls
from vllm.tool_parsers.parser import Steps

BEGIN = "functools"


class Phi4MiniJson(JsonCalls):
    """`functools[{"name": ..., "arguments": {...}}, ...]`."""

    name = "phi4_mini_json"
    template_marks = ("functools[",)

    def parse(self) -> Steps:
        yield from self.calls_between(BEGIN, self.list_calls)
