"""`minimax_m2`: MiniMax-M2."""

from collections.abc import Generator

from vllm.tool_parsers.parser import Steps, TaggedArguments

BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, INVOKE_END = '<invoke name="', "</invoke>"
PARAMETER, PARAMETER_END = '<parameter name="', "</parameter>"


class MiniMaxM2(TaggedArguments):
    """`<minimax:tool_call><invoke name="NAME"><parameter name="KEY">TEXT</parameter>...</invoke>`
    with one or more invocations before the end tag."""

    name = "minimax_m2"
    template_marks = (BEGIN,)
    grammar = "minimax"
    keeps_special_tokens = True

    def parse(self) -> Steps:
        yield from self.calls_between(BEGIN, self._some)

    def _some(self) -> Steps:
        yield from self.space()
        yield from self.one_of(INVOKE)
        while True:
            name = yield from self.name_before('">')
            yield from self.arguments(name, self._parameter)
            yield from self.space()
            yield from self.one_of(INVOKE_END, "")
            yield from self.space()
            if (yield from self.one_of(INVOKE, END, "")) != INVOKE:
                break
        yield from self.space()

    def _parameter(self) -> Generator[None, None, tuple[str, str] | None]:
        yield from self.space()
        if not (yield from self.one_of(PARAMETER, "")):
            return None
        key, parts = (yield from self.name_before('">')), list[str]()
        yield from self.until(PARAMETER_END, emit=parts.append)
        return key, "".join(parts)
