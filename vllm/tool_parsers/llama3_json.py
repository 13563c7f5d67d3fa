"""`llama3_json`: Llama 3.1 to 3.3."""

from vllm.tool_parsers.json_call import JsonCalls
from vllm.tool_parsers.parser import Steps

BEGIN = "<|python_tag|>"


class Llama3Json(JsonCalls):
    """`{"name": ..., "parameters": {...}}`, several after one another, with `;` between them or
    not. An answer that begins otherwise is text, and may have calls after `<|python_tag|>`."""

    name = "llama3_json"
    template_marks = ("<|start_header_id|>", '"parameters"')
    grammar = "llama"
    tells_calls_by_name = True
    keeps_special_tokens = True

    def parse(self) -> Steps:
        space = yield from self.space()
        if (yield from self.char()) == "{":
            yield from self._some("")
        else:
            self.content(space)
        yield from self.calls_between(BEGIN, self._some_or_none)

    def _some_or_none(self) -> Steps:
        yield from self._some(BEGIN)

    def _some(self, begin: str) -> Steps:
        yield from self.space()
        while (yield from self.char()) == "{":
            if not (yield from self.or_content(begin, self.object_call)):
                return
            begin = ""
            yield from self.space()
            yield from self.one_of(";", ",", "")
            yield from self.space()
