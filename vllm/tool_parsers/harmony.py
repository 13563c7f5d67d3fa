"""`openai`, and `gpt_oss` of reasoning: the harmony format of gpt-oss."""

from vllm.tool_parsers.parser import Parser, Steps

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")


class Harmony(Parser):
    """Messages with a header: the channel `analysis` is reasoning, one to `functions.NAME` is a
    call, all others are content."""

    name = "openai"
    template_marks = (CHANNEL, "commentary")
    grammar = "harmony"
    keeps_special_tokens = True

    def parse(self) -> Steps:
        while (yield from self.char()):
            header: list[str] = []
            mark = yield from self.until(MESSAGE, *ENDS, emit=header.append)
            words = "".join(header).replace(CHANNEL, " ").replace(START, " ")
            if mark == MESSAGE:
                yield from self._message(words)
            elif mark is None and CHANNEL not in "".join(header):
                self.content("".join(header))

    def _message(self, header: str) -> Steps:
        _, _, recipient = header.partition("to=functions.")
        name = (recipient.split() or [""])[0].partition("<")[0]
        emit = self.content
        if name:
            emit = self.call(name)
        elif "analysis" in header.split():
            emit = self.reasoning
        yield from self.until(*ENDS, emit=emit)
