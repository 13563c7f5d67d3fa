"""Requests of Anthropic's `/v1/messages`, and what they are as requests for chat."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from vllm.entrypoints.openai.output_format import Items, _Lenient
from vllm.entrypoints.openai.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.translated import TranslatedRequest, item_of, joined_text, type_of
from vllm.errors import RequestError

Json = dict[str, Any]
Place = tuple[str | int, ...]

_TEXT = ("text",)
_USER_BLOCKS = ("text", "tool_result")
_ASSISTANT_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use")
_CUSTOM = "custom"


class CustomTool(_Lenient):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def chat(self) -> Json:
        function = {"name": self.name, "description": self.description,
                    "parameters": self.input_schema, "strict": self.strict}  # fmt: skip
        return {"type": "function", "function": function}


class ToolChoice(_Lenient):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(_Lenient):
    """display: omitted leaves the text out."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(_Lenient):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Lenient):
    effort: str | None = None
    format: OutputFormat | None = None


class Message(_Lenient):
    role: Literal["user", "assistant", "system"]
    content: str | list[Any]


class TextBlock(_Lenient):
    text: str


class ThinkingBlock(_Lenient):
    thinking: str


class ToolUse(_Lenient):
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(_Lenient):
    tool_use_id: str
    content: str | list[Any] = ""


class CountTokensRequest(TranslatedRequest):
    """Fields of type Any are checked where they are read."""

    messages: Annotated[list[Any], Field(min_length=1)]
    system: str | list[Any] | None = None
    thinking: Thinking | None = None
    tool_choice: ToolChoice | None = None
    tools: list[Any] | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    container: Any = None
    mcp_servers: Any = None

    ignored_fields: ClassVar[frozenset[str]] = frozenset(
        {"betas", "cache_control", "context_management", "diagnostics", "inference_geo", "metadata",
         "service_tier", "speed", "user_profile_id", "workspace_id"}
    )  # fmt: skip
    chat_names: ClassVar[Mapping[str, str]] = {
        "prompt": "messages",
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "structured_outputs": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "thinking_token_budget": "thinking.budget_tokens",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    }
    unserved: ClassVar[Mapping[str, str]] = {
        "container": "no code runs on this server; leave it out",
        "mcp_servers": "give the tools of those servers as tools",
    }

    @property
    def shows_thinking(self) -> bool:
        given = self.thinking
        return given is not None and given.type != "disabled" and given.display != "omitted"

    def to_chat(self) -> ChatCompletionRequest:
        return self.chat(self._own())

    def _own(self) -> Json:
        turns = self._turns()
        last = turns[-1]
        # The answer goes on with a text of the assistant that comes last.
        is_begun = last["role"] == "assistant" and not last.get("tool_calls")
        return {
            "messages": turns,
            "continue_final_message": is_begun or None,
            "include_reasoning": self.shows_thinking,
            "response_format": self._response_format(),
            "reasoning_effort": self.output_config.effort if self.output_config else None,
            **self._tools(),
            **self._thinking(),
        }

    def _turns(self) -> list[Json]:
        turns: list[Json] = []
        if self.system:
            text = joined_text(self.system, _TEXT, ("system",))
            turns.append({"role": "system", "content": text})
        for place, given in enumerate(self.messages):
            at: Place = ("messages", place)
            if _is_plain(given):
                turns.append({"role": given["role"], "content": given["content"]})
                continue
            message = item_of(Message, given, at)
            at = (*at, "content")
            if isinstance(message.content, str) or message.role == "system":
                text = joined_text(message.content, _TEXT, at)
                turns.append({"role": message.role, "content": text})
            elif message.role == "user":
                turns += _user_turns(message.content, at)
            else:
                turns.append(_assistant_turn(message.content, at))
        return turns

    def _thinking(self) -> Json:
        """As the API has it, there is none unless asked for; templates know either name."""
        given = self.thinking
        is_on = given is not None and given.type != "disabled"
        kwargs = {"enable_thinking": is_on, "thinking": is_on, **(self.chat_template_kwargs or {})}
        budget = given.budget_tokens if given is not None and given.type == "enabled" else None
        return {"chat_template_kwargs": kwargs, "thinking_token_budget": budget}

    def _response_format(self) -> Json | None:
        given = self.output_config.format if self.output_config else None
        given = given or self.output_format
        if given is None:
            return None
        return {"type": "json_schema", "json_schema": {"schema": given.schema_}}

    def _tools(self) -> Json:
        tools = []
        for place, given in enumerate(self.tools or ()):
            at: Place = ("tools", place)
            if not isinstance(given, dict) or given.get("type") not in (None, _CUSTOM):
                type_of(given, (_CUSTOM,), at)
            tools.append(item_of(CustomTool, given, at).chat())
        own: Json = {"tools": tools or None}
        choice = self.tool_choice
        if choice is None:
            return own
        if choice.disable_parallel_tool_use:
            own["parallel_tool_calls"] = False
        if choice.type != "tool":
            own["tool_choice"] = {"any": "required"}.get(choice.type, choice.type)
            return own
        if choice.name is None:
            raise RequestError("tool_choice of type tool needs a name", "tool_choice")
        own["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        return own


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Items[str] | None = None

    def _own(self) -> Json:
        own = {"max_tokens": self.max_tokens, "stop": self.stop_sequences}
        return {**super()._own(), **own}


def _is_plain(message: Any) -> bool:
    """Whether it is a text, as most are; a history has many."""
    is_text = isinstance(message, dict) and isinstance(message.get("content"), str)
    return is_text and message.get("role") in ("user", "assistant")


def _user_turns(content: list[Any], at: Place) -> list[Json]:
    """Results of tools are turns of their own; texts beside each other are one."""
    turns: list[Json] = []
    texts: list[str] = []

    def end_texts() -> None:
        if texts:
            turns.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    for place, given in enumerate(content):
        own: Place = (*at, place)
        if type_of(given, _USER_BLOCKS, own) == "text":
            texts.append(item_of(TextBlock, given, own).text)
            continue
        end_texts()
        result = item_of(ToolResult, given, own)
        text = joined_text(result.content, _TEXT, (*own, "content"))
        turns.append({"role": "tool", "tool_call_id": result.tool_use_id, "content": text})
    end_texts()
    return turns or [{"role": "user", "content": ""}]


def _assistant_turn(content: list[Any], at: Place) -> Json:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []

    def call(given: Any, own: Place) -> None:
        use = item_of(ToolUse, given, own)
        function = {"name": use.name, "arguments": use.input}
        calls.append({"id": use.id, "type": "function", "function": function})

    read: dict[str, Callable[[Any, Place], None]] = {
        "text": lambda given, own: texts.append(item_of(TextBlock, given, own).text),
        "thinking": lambda given, own: thoughts.append(item_of(ThinkingBlock, given, own).thinking),
        "redacted_thinking": lambda given, own: None,
        "tool_use": call,
    }
    for place, given in enumerate(content):
        own: Place = (*at, place)
        read[type_of(given, _ASSISTANT_BLOCKS, own)](given, own)
    turn: Json = {"role": "assistant"}
    if texts or not calls:
        turn["content"] = "\n".join(texts)
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    return turn | ({"tool_calls": calls} if calls else {})
