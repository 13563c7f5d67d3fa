"""`json`: a JSON list of calls and nothing else, which a grammar makes any model write."""

from vllm.tool_parsers.json_call import JsonCalls
from vllm.tool_parsers.parser import Steps


class JsonArray(JsonCalls):
    """`[{"name": ..., "arguments": {...}}, ...]`; other text is content."""

    name = "json"
    tells_calls_by_name = True

    def parse(self) -> Steps:
        yield from self.space()
        yield from self.or_content("", self.list_calls)
