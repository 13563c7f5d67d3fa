"""`deepseek_v3`: DeepSeek V3 and R1."""

from vllm.tool_parsers.parser import Parser, Steps

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
FENCE, FENCE_END = "```json", "```"


class DeepSeekV31(Parser):
    """One call after another: its name, a separator, and the JSON of its arguments."""

    name = "deepseek_v31"
    template_marks = (SEP,)
    grammar = "deepseek_v3_1"
    keeps_special_tokens = True

    def parse(self) -> Steps:
        while (
            mark := (yield from self.until(BEGIN, CALL_BEGIN, END, emit=self.content))
        ) is not None:
            if mark == CALL_BEGIN:
                yield from self.or_content(mark, self.one_call)
            yield from self.space()

    def one_call(self) -> Steps:
        name = yield from self.name_before(SEP)
        yield from self.space()
        yield from self.json_text(self.call(name))
        yield from self.space()
        yield from self.one_of(CALL_END, "")


class DeepSeekV3(DeepSeekV31):
    """The kind (`function`), a separator, the name, and the JSON of its arguments in a fence."""

    name = "deepseek_v3"
    template_marks = (SEP, FENCE)
    grammar = "deepseek_r1"

    def one_call(self) -> Steps:
        yield from self.name_before(SEP)
        name = yield from self.name_before(FENCE)
        yield from self.space()
        yield from self.json_text(self.call(name))
        yield from self.space()
        yield from self.one_of(FENCE_END, "")
        yield from self.one_of(CALL_END, "")
