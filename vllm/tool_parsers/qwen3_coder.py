"""`qwen3_coder` and `qwen3_xml`: Qwen3-Coder and Qwen3.5."""

from collections.abc import Generator

from vllm.tool_parsers.parser import Steps, TaggedArguments

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


class Qwen3Coder(TaggedArguments):
    """`<tool_call><function=NAME><parameter=KEY>TEXT</parameter>...</function></tool_call>`; the
    outer tag may lack."""

    name = "qwen3_coder"
    template_marks = (FUNCTION, PARAMETER)
    grammar = "qwen_3_5"

    def parse(self) -> Steps:
        while (mark := (yield from self.until(BEGIN, FUNCTION, emit=self.content))) is not None:
            yield from self.or_content(mark, self._named if mark == FUNCTION else self._tagged)

    def _tagged(self) -> Steps:
        yield from self.space()
        yield from self.one_of(FUNCTION)
        yield from self._named()

    def _named(self) -> Steps:
        name = yield from self.name_before(">")
        yield from self.arguments(name, self._parameter)
        yield from self.space()
        yield from self.one_of(FUNCTION_END, "")
        yield from self.space()
        yield from self.one_of(END, "")
        yield from self.space()

    def _parameter(self) -> Generator[None, None, tuple[str, str] | None]:
        yield from self.space()
        if not (yield from self.one_of(PARAMETER, "")):
            return None
        key, parts = (yield from self.name_before(">")), list[str]()
        # A model may forget to close a parameter; one that it closed may hold any other tag.
        yield from self.until(PARAMETER_END, f"\n{FUNCTION_END}\n{END}", emit=parts.append)
        return key, "".join(parts).removeprefix("\n").removesuffix("\n")


class Qwen3Xml(Qwen3Coder):
    name = "qwen3_xml"
    template_marks = ()
