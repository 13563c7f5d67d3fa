"""The requests that the HTTP API takes, checked field by field.

A field that is null counts as not given. What becomes of a field that is not known, or not
honoured, is in `field_policy`.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    model_validator,
)

from vllm.entrypoints.openai.output_format import (
    Items,
    ResponseFormat,
    StructuredOutputs,
    _Lenient,
    _Strict,
)
from vllm.errors import RequestError
from vllm.sampling_params import (
    MAX_BEAMS,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm.tool_parsers.schemas import Tool

MAX_PROMPTS = 2048
MAX_TOP_LOGPROBS = 20
DEFAULT_MAX_TOKENS = 16
_MAX_TOKEN_ID = 2**31 - 1
_MAX_ID_DIGITS = 10
NAMED = "function:"
# Printable, without space, quote and backslash.
REQUEST_ID = r"^[!#-\[\]-~]{1,128}$"
_GUIDED = ("json", "regex", "choice", "grammar")


def _is_token_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_TOKEN_ID


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_token_id, value))


def _token_ids(value: list[int]) -> list[int]:
    if not _is_token_ids(value):
        raise ValueError(f"takes token ids from 0 to {_MAX_TOKEN_ID}")
    return value


def _texts(value: Any) -> list[str] | None:
    if value is None or (isinstance(value, list) and all(isinstance(v, str) for v in value)):
        return value
    if isinstance(value, str):
        return [value]
    raise ValueError("takes a text or a list of texts")


def _prompts(value: Any) -> list[str | list[int]]:
    """One or many prompts, each a text or token ids, as a list of prompts."""
    if isinstance(value, str) or (value and _is_token_ids(value)):
        return [value]
    is_list = isinstance(value, list) and 0 < len(value) <= MAX_PROMPTS
    if is_list and (all(isinstance(v, str) for v in value) or all(map(_is_token_ids, value))):
        return list(value)
    raise ValueError(
        f"takes a text, a list of token ids (0 to {_MAX_TOKEN_ID}), or a list of 1 to "
        f"{MAX_PROMPTS} of either kind"
    )


def _message_text(content: Any) -> str:
    """The text of a message: given as it is or as parts of type text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError("takes a text or a list of parts of type text")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            is_other = isinstance(kind, str) and kind != "text"
            named = f"; {kind!r} is not supported" if is_other else ""
            raise ValueError(f'takes parts {{"type": "text", "text": "..."}} only{named}')
    return "\n".join(part["text"] for part in content)


# No vocabulary has more tokens.
TokenIds = Annotated[Items[int], Field(max_length=2**20), AfterValidator(_token_ids)]


class StreamOptions(_Strict):
    """continuous_usage_stats: usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


_SAMPLED = ("temperature", "top_p", "top_k", "min_p", "seed")
_NOT_OF_BEAMS = (
    *("stream", "stop", "stop_token_ids", "min_tokens", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "bad_words", "allowed_token_ids", "logprob_token_ids"),
)


class GenerationRequest(_Strict):
    """What completions and chat completions have in common."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_texts)] = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    bad_words: Items[str] | None = None
    allowed_token_ids: TokenIds | None = None
    logprob_token_ids: TokenIds | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    request_id: Annotated[str, Field(pattern=REQUEST_ID)] | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    _warnings: list[str] = PrivateAttr(default_factory=list)

    @property
    def warnings(self) -> list[str]:
        """What to tell the client besides the answer, in the header `Warning`."""
        return self._warnings

    def truncated(self, token_ids: list[int], max_model_len: int) -> list[int]:
        """The last tokens of a prompt, as many as truncate_prompt_tokens says: -1 for those that
        leave room for the answer."""
        count = self.truncate_prompt_tokens
        if count is None:
            return token_ids
        if count < 0:
            most = self.own_params()["max_tokens"]
            count = max(max_model_len - max(1 if most is None else most, 1), 1)
        return token_ids[len(token_ids) - count :] if count < len(token_ids) else token_ids

    @property
    def num_choices(self) -> int:
        return self.n if self.n is not None else 1

    def check(self) -> None:
        """What no single field can tell; raises RequestError."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", "stream_options")
        if self.logprob_token_ids and self.own_params()["logprobs"] is None:
            raise RequestError("logprob_token_ids needs logprobs", "logprob_token_ids")
        if self.truncate_prompt_tokens == 0:
            raise RequestError(
                "truncate_prompt_tokens 0 leaves no prompt: it takes 1 or more, or -1 for the "
                "context's length",
                "truncate_prompt_tokens",
            )
        if self.use_beam_search:
            self._check_beams()
        elif self.length_penalty is not None:
            self.warnings.append("length_penalty has no effect without use_beam_search")

    def _check_beams(self) -> None:
        """Beams are no samples: what edits or filters logits, or stops a text, is not for them."""
        for name in _NOT_OF_BEAMS:
            value = getattr(self, name)
            if value and not (name == "repetition_penalty" and value == 1):
                raise RequestError(f"use_beam_search does not heed {name}; leave it out", name)
        if self.num_choices > MAX_BEAMS:
            raise RequestError(f"n is the number of beams: at most {MAX_BEAMS}", "n")
        no_effect = [name for name in _SAMPLED if getattr(self, name) is not None]
        self.warnings.extend(f"{name} has no effect in a beam search" for name in no_effect)

    def own_params(self) -> dict[str, Any]:
        """Of SamplingParams, max_tokens and what concerns logprobs."""
        raise NotImplementedError

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The engine's parameters; `defaults` fill what the request leaves open."""
        known = SamplingParams.__struct_fields__
        given = {name: value for name, value in self if name in known and value is not None}
        own = {
            **self.own_params(),
            "logit_bias": self._logit_bias(),
            "structured_outputs": self._structured_outputs(),
            "output_kind": RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY,
        }
        if self.use_beam_search:
            own["temperature"] = 1.0  # any one that lets choices differ
        return SamplingParams(**{**defaults, **given, **own})

    def _logit_bias(self) -> dict[int, float] | None:
        if not self.logit_bias:
            return None
        for key in self.logit_bias:
            if not (key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS):
                raise RequestError(f"logit_bias takes token ids as keys, not {key!r}", "logit_bias")
        return {int(key): bias for key, bias in self.logit_bias.items()}

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        asked = self.asked_grammar()
        return None if asked is None else StructuredOutputsParams(**asked)

    def asked_grammar(self) -> dict[str, Any] | None:
        """The one grammar asked for, under whichever name."""
        asked = {
            f"guided_{kind}": {kind: grammar}
            for kind in _GUIDED
            if (grammar := getattr(self, f"guided_{kind}")) is not None
        }
        if self.structured_outputs is not None:
            grammar = self.structured_outputs.model_dump(by_alias=True, exclude_none=True)
            asked["structured_outputs"] = grammar
        if self.structural_tag is not None:
            asked["structural_tag"] = {"structural_tag": self.structural_tag}
        if self.response_format is not None and self.response_format.type != "text":
            asked["response_format"] = self.response_format.grammar()
        if len(asked) > 1:
            raise RequestError(f"{', '.join(asked)} exclude each other", list(asked)[1])
        return next(iter(asked.values()), None)


class CompletionRequest(GenerationRequest):
    prompt: Annotated[Any, AfterValidator(_prompts)]
    """After validation a list of prompts, each a text or token ids."""
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        super().check()
        if self.suffix:
            raise RequestError(
                "suffix is not supported: models here only continue a text", "suffix"
            )
        if self.best_of is not None and self.best_of != self.num_choices:
            raise RequestError(
                f"best_of ({self.best_of}) is not supported unless it equals n "
                f"({self.num_choices}): every choice is returned",
                "best_of",
            )
        if len(self.prompt) * self.num_choices > MAX_PROMPTS:
            raise RequestError(
                f"{len(self.prompt)} prompts with n = {self.num_choices} are more than "
                f"{MAX_PROMPTS} choices; split the request",
                "prompt",
            )

    def own_params(self) -> dict[str, Any]:
        shown = self.logprobs if self.echo else None
        return {
            "max_tokens": DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            "logprobs": self.logprobs,
            "prompt_logprobs": shown if self.prompt_logprobs is None else self.prompt_logprobs,
        }


class FunctionCall(_Lenient):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(_Lenient):
    """A call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """Templates take the arguments as an object."""
        arguments = self.function.arguments or {}
        if isinstance(arguments, str):
            arguments = _json_object(arguments, self.function.name)
        function = {"name": self.function.name, "arguments": arguments}
        call = {"type": "function", "function": function}
        return call if self.id is None else {"id": self.id, **call}


def _json_object(text: str, name: str) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RequestError(
            f"messages: arguments of a call of {name!r} are {text[:80]!r}; they take the text of "
            f"a JSON object",
            "messages",
        )
    return found


class ChatMessage(_Lenient):
    """One turn. Fields that are not known are left out: clients send answers back with their own.
    tool_call_id: of a turn of role tool, which call it answers."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_message_text)] = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> "ChatMessage":
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing: only an assistant's with tool_calls may lack it")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to messages of role assistant")
        return self

    def for_template(self, without_content: str | None = "") -> dict[str, Any]:
        """without_content: what the template takes for the content of a turn that has none."""
        role = "system" if self.role == "developer" else self.role
        content = without_content if self.content is None else self.content
        turn: dict[str, Any] = {"role": role, "content": content}
        if self.tool_calls:
            turn["tool_calls"] = [call.for_template() for call in self.tool_calls]
        reasoning = self.reasoning_content or self.reasoning
        others = {"name": self.name, "reasoning_content": reasoning,
                  "tool_call_id": self.tool_call_id}  # fmt: skip
        return turn | {key: value for key, value in others.items() if value is not None}


class FunctionDefinition(_Lenient):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolParam(_Lenient):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition

    def tool(self) -> Tool:
        own = self.function
        return Tool(own.name, own.description, own.parameters, own.strict)


class NamedFunction(_Lenient):
    name: str


class NamedToolChoice(_Lenient):
    type: Literal["function"]
    function: NamedFunction


class TemplateFields(_Strict):
    """How messages become a prompt. add_generation_prompt: open the answer (the default)."""

    messages: Annotated[Items[ChatMessage], Field(min_length=1)]
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Items[ToolParam] | None = None
    documents: Items[dict[str, Any]] | None = None
    reasoning_effort: str | None = None

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """What the template is told of tools."""
        return [param.tool().to_json() for param in self.tools or ()] or None

    @property
    def opens_answer(self) -> bool:
        given = self.add_generation_prompt
        return not self.continue_final_message if given is None else given

    def check_template_fields(self) -> None:
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other",
                "continue_final_message",
            )


class ChatCompletionRequest(TemplateFields, GenerationRequest):
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: Items[str] | None = None

    @property
    def choice(self) -> str:
        """none, auto, required, or the name of a tool after `function:`."""
        if isinstance(self.tool_choice, NamedToolChoice):
            return f"{NAMED}{self.tool_choice.function.name}"
        return self.tool_choice or ("auto" if self.tools else "none")

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        return None if self.choice == "none" else super().template_tools

    def check(self) -> None:
        super().check()
        self.check_template_fields()
        self._check_tools()
        if self.functions or self.function_call not in (None, "none"):
            named = "functions" if self.functions else "function_call"
            raise RequestError(f"{named} is not supported: give the functions as tools", named)
        if self.modalities not in (None, ["text"]):
            raise RequestError('modalities takes ["text"] only', "modalities")
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(
                f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}, not {self.top_logprobs}",
                "top_logprobs",
            )

    def _check_tools(self) -> None:
        names = [param.function.name for param in self.tools or ()]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise RequestError(f"tools has {twice[0]!r} twice; give each its own name", "tools")
        choice = self.choice
        if choice == "required" and not names:
            raise RequestError("tool_choice required needs tools", "tool_choice")
        if choice.startswith(NAMED) and choice.removeprefix(NAMED) not in names:
            offered = ", ".join(names) or "none"
            raise RequestError(
                f"tool_choice names {choice.removeprefix(NAMED)!r}; tools offers {offered}",
                "tool_choice",
            )

    def own_params(self) -> dict[str, Any]:
        most = self.max_completion_tokens
        return {
            "max_tokens": self.max_tokens if most is None else most,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }


class TokenizeTextRequest(_Strict):
    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(TemplateFields):
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Strict):
    model: str | None = None
    tokens: Annotated[Items[int], AfterValidator(_token_ids)]
