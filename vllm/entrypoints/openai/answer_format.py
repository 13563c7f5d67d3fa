"""How the answer to a chat is written and read: its reasoning, its calls of tools, its grammar."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from vllm.engine.grammar import MAX_GRAMMAR_CHARS
from vllm.engine.json_schemas import check_schema
from vllm.entrypoints.openai.protocol import NAMED, ChatCompletionRequest
from vllm.errors import GrammarError, RequestError
from vllm.logger import get_logger
from vllm.reasoning.parser import ReasoningFormat, ReasoningParser
from vllm.reasoning.registry import HARMONY
from vllm.tool_parsers.harmony import Harmony
from vllm.tool_parsers.json_array import JsonArray
from vllm.tool_parsers.parser import Content, Event, Parser
from vllm.tool_parsers.registry import parser_of_template
from vllm.tool_parsers.schemas import Tool

logger = get_logger(__name__)

Json = dict[str, Any]


@dataclass
class AnswerFormats:
    """What the server knows of its model's answers. parser: of --tool-call-parser; None: found
    from the chat template. reasoning: of --reasoning-parser."""

    parser: type[Parser] | None = None
    reasoning: ReasoningFormat | None = None

    def of(self, request: ChatCompletionRequest, template: str, prompt: str) -> "AnswerFormat":
        """prompt: the text after which the answer comes. RequestError for tools that this model's
        answers or template cannot have, or whose schemas no grammar holds."""
        tools = [param.tool() for param in request.tools or ()]
        if request.choice == "none":
            tools = []
        parser = self._parser(request, template) if tools else None
        if parser is None:
            tools, parser = [], self._without_tools()
        form = None if parser is Harmony else self.reasoning
        is_open = form.is_open_after(prompt) if form else None
        may_reason = form is not None or parser is Harmony or "think" in template.lower()
        answer = AnswerFormat(request, tools, parser, form, is_open, may_reason)
        answer.grammar = _grammar(answer, prompt)
        return answer

    def _without_tools(self) -> type[Parser] | None:
        """Of harmony reasoning is read by the parser of calls."""
        is_harmony = self.reasoning is not None and self.reasoning.name == HARMONY
        return Harmony if is_harmony else None

    def _parser(self, request: ChatCompletionRequest, template: str) -> type[Parser] | None:
        parser = self.parser or _found_parser(template)
        is_forced = request.choice != "auto"
        if "tools" not in template:
            if is_forced:
                raise RequestError(
                    "the chat template does not tell the model of tools: leave tools out, or start "
                    "the server with a --chat-template that does",
                    "tools",
                )
            request.warnings.append("the chat template does not tell the model of the tools")
            _warn_of_template(template)
            if parser is None:
                return None
        if parser is None and not is_forced:
            raise RequestError(
                'tools with tool_choice "auto" need a parser of this model\'s calls, and its chat '
                "template is of none that is known: start the server with --tool-call-parser NAME, "
                'or give tool_choice "required" or a name',
                "tools",
            )
        return parser if parser and (parser.grammar or not is_forced) else JsonArray


@lru_cache(maxsize=8)
def _warn_of_template(template: str) -> None:
    """Once per template."""
    logger.warning("the chat template does not tell the model of tools: requests with tools are "
                   "answered without them")  # fmt: skip


@lru_cache(maxsize=8)
def _found_parser(template: str) -> type[Parser] | None:
    """Of this template alone: a request may bring its own."""
    if (found := parser_of_template(template)) is not None:
        logger.info("--tool-call-parser %s, by the chat template", found.name)
    return found


@dataclass
class AnswerFormat:
    """Of one request. parser: None where no tools are offered. is_open: whether the answer begins
    within reasoning, None where its text tells. may_reason: whether anything says that this model
    reasons; forced calls of another begin at once. grammar: fields of StructuredOutputsParams."""

    request: ChatCompletionRequest
    tools: Sequence[Tool]
    parser: type[Parser] | None
    reasoning: ReasoningFormat | None
    is_open: bool | None
    may_reason: bool
    grammar: Json | None = None

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether marks of the format are special tokens, which the text must have."""
        is_parsed = self.parser is not None and self.parser.keeps_special_tokens
        return is_parsed or (self.reasoning is not None and self.reasoning.keeps_special_tokens)

    @property
    def is_plain(self) -> bool:
        """Whether the answer is content and nothing else."""
        return self.parser is None and self.reasoning is None

    def reader(self) -> "AnswerReader":
        reasoning = ReasoningParser(self.reasoning, self.is_open) if self.reasoning else None
        return AnswerReader(reasoning, self.parser(self.tools) if self.parser else None)


@dataclass
class AnswerReader:
    """The two parsers one after the other, for one choice."""

    reasoning: ReasoningParser | None
    calls: Parser | None

    def feed(self, text: str, is_last: bool) -> list[Event]:
        events: list[Event] = [Content(text)] if text else []
        if self.reasoning is not None:
            events = self.reasoning.feed(text, is_last)
        if self.calls is None:
            return events
        found: list[Event] = []
        for event in events:
            found += self.calls.feed(event.text) if isinstance(event, Content) else [event]
        return found + self.calls.feed("", is_last) if is_last else found


def _grammar(answer: AnswerFormat, prompt: str) -> Json | None:
    """What holds the answer to the tools, its reasoning and the format that the request asks for;
    None for nothing beyond that format."""
    request, asked = answer.request, answer.request.asked_grammar() or {}
    if answer.tools:
        if asked and request.choice != "auto":
            raise RequestError(
                "tool_choice and response_format or structured_outputs exclude each other",
                "tool_choice",
            )
        return _calls_grammar(answer, prompt, asked)
    if answer.reasoning is None or answer.is_open is False:
        return None
    if not asked and request.thinking_token_budget is None:
        return None
    content = _as_format(asked) if asked else {"type": "any_text"}
    return {"structural_tag": _after_reasoning(answer, content)}


def _calls_grammar(answer: AnswerFormat, prompt: str, asked: Json) -> Json | None:
    request, parser = answer.request, answer.parser
    assert parser is not None
    tools = [_checked(tool, request.choice) for tool in answer.tools]
    is_parallel = request.parallel_tool_calls is not False
    if parser is JsonArray:
        return {"structural_tag": _json_array(answer, tools, is_parallel)}
    if not parser.grammar:
        if asked:
            raise RequestError(
                f"response_format beside tools is not supported with --tool-call-parser "
                f"{parser.name}: leave one of them out",
                "response_format",
            )
        return None
    name = request.choice.removeprefix(NAMED)
    choice: Any = request.choice
    if request.choice.startswith(NAMED):
        choice = {"type": "function", "function": {"name": name}}
    mode = {True: "enabled", False: "disabled", None: "auto"}[_is_open(answer, prompt)]
    calls = {"model": parser.grammar, "tools": tools, "tool_choice": choice, "reasoning": mode,
             "parallel_tool_calls": is_parallel}  # fmt: skip
    if asked:
        # Either calls or the format: free text before calls would be neither.
        calls |= {"tool_choice": "required", "or_else": _after_reasoning(answer, _as_format(asked))}
    return {"tool_calls": calls}


def _is_open(answer: AnswerFormat, prompt: str) -> bool | None:
    """As `AnswerFormat.is_open`, also of a server that was told of no reasoning format."""
    if answer.reasoning is not None:
        return answer.is_open
    return ReasoningFormat("").is_open_after(prompt) if answer.may_reason else False


def _checked(tool: Tool, choice: str) -> Json:
    """For xgrammar. Where the request does not insist, arguments whose schema no grammar holds may
    be any object; RequestError where it does."""
    shown = tool.to_json()
    if tool.parameters is None or tool.is_strict is False:
        return {**shown, "function": {**shown["function"], "strict": False}}
    try:
        _check(json.dumps(tool.parameters))
    except GrammarError as error:
        if tool.is_strict or choice != "auto":
            raise RequestError(f"tools: {tool.name!r}: {error}", "tools") from error
        return {**shown, "function": {**shown["function"], "strict": False}}
    return shown


def _check(schema: str) -> None:
    """GrammarError for a schema that no grammar holds, or one too long to look at in the event
    loop."""
    if len(schema) > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"{len(schema)} characters; at most {MAX_GRAMMAR_CHARS} are taken")
    check_schema(schema)


def _json_array(answer: AnswerFormat, tools: Sequence[Json], is_parallel: bool) -> Json:
    """A list of calls of any of `tools`, after the reasoning."""
    name = answer.request.choice.removeprefix(NAMED)
    is_named = answer.request.choice.startswith(NAMED)
    tags = []
    for tool in tools:
        function = tool["function"]
        if is_named and function["name"] != name:
            continue
        is_free = function.get("strict") is False
        schema = {"type": "object"} if is_free else function["parameters"]
        begin = f'{{"name": {json.dumps(function["name"])}, "arguments": '
        content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 16}
        tags.append({"type": "tag", "begin": begin, "content": content, "end": "}"})
    calls = {"type": "tags_with_separator", "tags": tags, "separator": ", ", "at_least_one": True,
             "stop_after_first": is_named or not is_parallel}  # fmt: skip
    return _after_reasoning(answer, {"type": "tag", "begin": "[", "content": calls, "end": "]"})


def _after_reasoning(answer: AnswerFormat, form: Json) -> Json:
    """`form`, behind the reasoning where the answer has one."""
    if answer.reasoning is None or answer.is_open is False:
        return form
    budget = answer.request.thinking_token_budget
    before = _reasoning_format(answer.reasoning, answer.is_open, budget)
    return {"type": "sequence", "elements": [before, form]}


def _reasoning_format(form: ReasoningFormat, is_open: bool | None, budget: int | None) -> Json:
    """Reasoning of at most `budget` tokens and the mark after it; optional where the answer may
    begin without."""
    text: Json = {"type": "any_text", "excludes": [form.end]}
    if budget is not None:
        text["max_tokens"] = budget
    begin = "" if is_open else form.begins[0]
    block = {"type": "tag", "begin": begin, "content": text, "end": form.end}
    return block if is_open else {"type": "optional", "content": block}


def _as_format(asked: Json) -> Json:
    """A grammar of StructuredOutputsParams as a part of a structural tag."""
    (kind, given), *_ = asked.items()
    if kind in ("json", "json_object"):
        schema = {"type": "object"} if kind == "json_object" else given
        text = schema if isinstance(schema, str) else json.dumps(schema)
        try:
            _check(text)
            parsed = json.loads(text)
        except (GrammarError, ValueError) as error:
            raise RequestError(f"structured output: {error}", "response_format") from error
        return {"type": "json_schema", "json_schema": parsed, "max_whitespace_cnt": 16}
    if kind == "regex":
        return {"type": "regex", "pattern": given}
    if kind == "choice":
        return {
            "type": "or",
            "elements": [{"type": "const_string", "value": one} for one in given],
        }
    if kind == "grammar":
        return {"type": "grammar", "grammar": given}
    try:
        tag = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise RequestError(f"structural_tag: {error}", "structured_outputs") from error
    form = tag.get("format", tag) if isinstance(tag, dict) else tag
    if not isinstance(form, dict):
        raise RequestError(
            "structural_tag takes an object with a format, or that format", "structured_outputs"
        )
    return form
