"""`mistral`: Mistral, Ministral, Devstral and Magistral."""

from uuid import uuid4

from vllm.tool_parsers.json_call import JsonCalls
from vllm.tool_parsers.parser import NotACall, Steps

BEGIN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class Mistral(JsonCalls):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, of later tokenizers
    `[TOOL_CALLS]name[ARGS]{...}` once per call, or with the object after the name at once."""

    name = "mistral"
    template_marks = (BEGIN,)
    keeps_special_tokens = True

    def call_id(self, name: str) -> str:
        """Nine letters and digits, which its chat templates ask for."""
        return uuid4().hex[:9]

    def parse(self) -> Steps:
        yield from self.calls_between(BEGIN, self._some)

    def _some(self) -> Steps:
        yield from self.space()
        if (yield from self.char()) == "[":
            yield from self.list_calls()
            yield from self.space()
            return
        parts: list[str] = []
        mark = yield from self.until(ARGS, CALL_ID, "{", emit=parts.append)
        name = "".join(parts).strip()
        if mark is None or not name:
            raise NotACall
        if mark == CALL_ID:
            yield from self.until(ARGS, emit=lambda _: None)
        emit = self.call(name)
        if mark == "{":
            self.unread(mark)
        yield from self.space()
        yield from self.json_text(emit)
        yield from self.space()
