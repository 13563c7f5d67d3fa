"""Requests of `/v1/responses`, and what they are as requests for chat."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from vllm.entrypoints.openai.output_format import Items, JsonSchema, _Lenient
from vllm.entrypoints.openai.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.translated import TranslatedRequest, item_of, joined_text, type_of
from vllm.errors import RequestError

Json = dict[str, Any]
Place = tuple[str | int, ...]

_ROLES = ("system", "developer", "user", "assistant")
_LOGPROBS = "message.output_text.logprobs"
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
_REASONING_PARTS = ("reasoning_text", "summary_text", "text")


class FunctionTool(_Lenient):
    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def chat(self) -> Json:
        function = {"name": self.name, "description": self.description,
                    "parameters": self.parameters, "strict": self.strict}  # fmt: skip
        return {"type": "function", "function": function}


class NamedChoice(_Lenient):
    name: str


class AllowedTools(_Lenient):
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[Any], Field(min_length=1)]


class ReasoningConfig(_Lenient):
    """summary: accepted; the reasoning is given whole."""

    effort: str | None = None
    summary: str | None = None


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]


class TextConfig(_Lenient):
    format: TextFormat | None = None
    verbosity: str | None = None


class MessageItem(_Lenient):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Any]


class FunctionCallItem(_Lenient):
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(_Lenient):
    call_id: str
    output: str | list[Any]


class ReasoningItem(_Lenient):
    content: list[Any] | None = None
    summary: list[Any] | None = None


class ItemReference(_Lenient):
    id: str


class ResponsesRequest(TranslatedRequest):
    """Fields of type Any are checked where they are read."""

    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    reasoning: ReasoningConfig | None = None
    store: bool | None = None
    stream_options: dict[str, Any] | None = None
    text: TextConfig | None = None
    tool_choice: Any = None
    tools: list[Any] | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Items[str] | None = None
    thinking_token_budget: int | None = None
    background: Any = None
    background_options: Any = None
    context_management: Any = None
    conversation: Any = None
    image: Any = None
    moderation: Any = None
    prompt: Any = None

    ignored_fields: ClassVar[frozenset[str]] = frozenset(
        {"access_programs", "client_metadata", "prompt_cache_key", "prompt_cache_options",
         "prompt_cache_retention", "safety_identifier", "service_tier", "user"}
    )  # fmt: skip
    chat_names: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "prompt": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "structured_outputs": "text.format",
        "reasoning_effort": "reasoning.effort",
        "logprobs": "top_logprobs",
    }
    unserved: ClassVar[Mapping[str, str]] = {
        "background": "the response is given while the client waits; leave it out",
        "background_options": "leave it out",
        "context_management": "send the input that the model is to see",
        "conversation": "send previous_response_id, or the whole conversation as input",
        "image": "this server takes text only",
        "moderation": "leave it out",
        "prompt": "send its text as instructions and input",
    }

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())

    def input_items(self) -> list[Any]:
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input

    def to_chat(self, turns: list[Json]) -> ChatCompletionRequest:
        """turns: the conversation, with the input."""
        if not turns and not self.instructions:
            raise RequestError("input is empty: it takes a text or at least one item", "input")
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        own: Json = {
            "messages": [*first, *turns],
            "max_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls,
            "thinking_token_budget": self.thinking_token_budget,
            "response_format": self._response_format(),
            # Whose tokens are of a text is told by what each step adds to it.
            "stream": bool(self.stream) or self.wants_logprobs,
            **self._tools(),
            **self._reasoning(),
        }
        if self.wants_logprobs:
            own |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        return self.chat(own)

    def _response_format(self) -> Json | None:
        given = self.text.format if self.text else None
        if given is None or given.type == "text":
            return None
        if given.type == "json_object":
            return {"type": "json_object"}
        if given.schema_ is None:
            raise RequestError("text.format of type json_schema needs a schema", "text.format")
        schema = given.model_dump(by_alias=True, exclude={"type"})
        return {"type": "json_schema", "json_schema": schema}

    def _reasoning(self) -> Json:
        effort = self.reasoning.effort if self.reasoning else None
        if effort != "none":
            return {"reasoning_effort": effort}
        kwargs = {"enable_thinking": False, "thinking": False, **(self.chat_template_kwargs or {})}
        return {"reasoning_effort": effort, "chat_template_kwargs": kwargs}

    def _tools(self) -> Json:
        tools = []
        for place, given in enumerate(self.tools or ()):
            at: Place = ("tools", place)
            type_of(given, ("function",), at)
            tools.append(item_of(FunctionTool, given, at).chat())
        choice = self.tool_choice
        if isinstance(choice, str) and choice not in ("none", "auto", "required"):
            raise RequestError(
                f"tool_choice {choice[:80]!r} is none of none, auto and required", "tool_choice"
            )
        if choice is None or isinstance(choice, str):
            return {"tools": tools or None, "tool_choice": choice}
        kind = type_of(choice, ("function", "allowed_tools"), ("tool_choice",))
        if kind == "function":
            name = item_of(NamedChoice, choice, ("tool_choice",)).name
            named = {"type": "function", "function": {"name": name}}
            return {"tools": tools or None, "tool_choice": named}
        allowed = item_of(AllowedTools, choice, ("tool_choice",))
        return {"tools": _only(tools, allowed), "tool_choice": allowed.mode}


def _only(tools: list[Json], allowed: AllowedTools) -> list[Json]:
    """Those of `tools` that may be called."""
    by_name = {tool["function"]["name"]: tool for tool in tools}
    found = {}
    for place, given in enumerate(allowed.tools):
        at: Place = ("tool_choice", "tools", place)
        type_of(given, ("function",), at)
        name = item_of(NamedChoice, given, at).name
        if name not in by_name:
            offered = ", ".join(by_name) or "none"
            raise RequestError(f"tool_choice names {name[:80]!r}; tools offers {offered}",
                               "tool_choice")  # fmt: skip
        found[name] = by_name[name]
    return list(found.values())


class _Turns:
    """Items as messages of chat. An assistant's reasoning, text and calls are one message."""

    def __init__(self, stored: Mapping[str, Json]):
        self.found: list[Json] = []
        self._stored = stored
        self._kinds: dict[str, Callable[[Json, Place], None]] = {
            "message": self._message,
            "function_call": self._call,
            "function_call_output": self._output,
            "reasoning": self._reasoning,
            "item_reference": self._reference,
        }

    def add(self, item: Any, at: Place) -> None:
        is_message = isinstance(item, dict) and item.get("type") is None and "role" in item
        kind = "message" if is_message else type_of(item, tuple(self._kinds), at)
        self._kinds[kind](item, at)

    def _message(self, item: Json, at: Place) -> None:
        role, text = item.get("role"), item.get("content")
        # Most are plain texts, and a history has many.
        if not (isinstance(text, str) and isinstance(role, str) and role in _ROLES):
            message = item_of(MessageItem, item, at)
            role, text = message.role, joined_text(message.content, _TEXT_PARTS, (*at, "content"))
        if role == "assistant":
            self._assistant("content")["content"] = text
        else:
            self.found.append({"role": role, "content": text})

    def _call(self, item: Json, at: Place) -> None:
        call = item_of(FunctionCallItem, item, at)
        function = {"name": call.name, "arguments": call.arguments}
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": call.call_id, "type": "function", "function": function})

    def _output(self, item: Json, at: Place) -> None:
        given = item_of(FunctionCallOutputItem, item, at)
        text = joined_text(given.output, _TEXT_PARTS, (*at, "output"))
        self.found.append({"role": "tool", "tool_call_id": given.call_id, "content": text})

    def _reasoning(self, item: Json, at: Place) -> None:
        given = item_of(ReasoningItem, item, at)
        name = "content" if given.content else "summary"
        parts = given.content or given.summary or []
        if text := joined_text(parts, _REASONING_PARTS, (*at, name)):
            turn = self._assistant("content", "tool_calls", "reasoning_content")
            turn["reasoning_content"] = text

    def _reference(self, item: Json, at: Place) -> None:
        item_id = item_of(ItemReference, item, at).id
        if item_id not in self._stored:
            place = ".".join(map(str, at))
            raise RequestError(
                f"{place}.id {item_id[:80]!r} is of no stored item: give the item itself", "input"
            )
        self.add(self._stored[item_id], at)

    def _assistant(self, *begun_by: str) -> Json:
        """The assistant's message that goes on, or a new one where it has one of `begun_by`."""
        last = self.found[-1] if self.found else {}
        if last.get("role") != "assistant" or any(name in last for name in begun_by):
            self.found.append({"role": "assistant"})
        return self.found[-1]


def referenced_ids(items: list[Any]) -> list[str]:
    """Of the stored items that input items refer to."""
    found = [item.get("id") for item in items
             if isinstance(item, dict) and item.get("type") == "item_reference"]  # fmt: skip
    return [name for name in found if isinstance(name, str)]


def turns_of(items: list[Any], stored: Mapping[str, Json]) -> list[Json]:
    """Input items as messages of chat; an error names the item. stored: what they refer to."""
    turns = _Turns(stored)
    for place, item in enumerate(items):
        turns.add(item, ("input", place))
    for turn in turns.found:
        if turn["role"] == "assistant" and not turn.get("tool_calls"):
            turn.setdefault("content", "")
    return turns.found
