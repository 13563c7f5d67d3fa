"""The requests that the HTTP API takes, checked field by field.

A field that is null counts as not given. A field that is not known is refused, because a mistyped
`max_token` that is silently dropped costs more than an error; only the fields of OpenAI's API
that say nothing about the text (IGNORED_FIELDS) are dropped.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from vllm.errors import RequestError
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

IGNORED_FIELDS = frozenset(
    {
        "user", "store", "metadata", "service_tier", "parallel_tool_calls", "safety_identifier",
        "prompt_cache_key", "prompt_cache_retention",
    }
)  # fmt: skip
"""Accepted at the top level of a request and without effect."""

MAX_PROMPTS = 2048
MAX_TOP_LOGPROBS = 20
DEFAULT_MAX_TOKENS = 16
_MAX_TOKEN_ID = 2**31 - 1
_MAX_ID_DIGITS = 10
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


class _Strict(BaseModel):
    """No conversions: `"16"` is not an integer, `1` is not a boolean."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}


class StreamOptions(_Strict):
    """continuous_usage_stats: usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(_Strict):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def grammar(self) -> dict[str, Any]:
        """Keywords of StructuredOutputsParams; not for type text."""
        if self.type == "json_object":
            return {"json_object": True}
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise RequestError(
                "response_format of type json_schema needs json_schema.schema", "response_format"
            )
        return {"json": self.json_schema.schema_}


class StructuredOutputs(_Strict):
    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


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
    stop_token_ids: Annotated[list[int], AfterValidator(_token_ids)] | None = None
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
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def num_choices(self) -> int:
        return self.n if self.n is not None else 1

    def check(self) -> None:
        """What no single field can tell; raises RequestError."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", "stream_options")

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
        return SamplingParams(**{**defaults, **given, **own})

    def _logit_bias(self) -> dict[int, float] | None:
        if not self.logit_bias:
            return None
        for key in self.logit_bias:
            if not (key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS):
                raise RequestError(f"logit_bias takes token ids as keys, not {key!r}", "logit_bias")
        return {int(key): bias for key, bias in self.logit_bias.items()}

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        """The one grammar asked for, under whichever name."""
        asked = {
            f"guided_{kind}": {kind: grammar}
            for kind in _GUIDED
            if (grammar := getattr(self, f"guided_{kind}")) is not None
        }
        if self.structured_outputs is not None:
            grammar = self.structured_outputs.model_dump(by_alias=True, exclude_none=True)
            asked["structured_outputs"] = grammar
        if self.response_format is not None and self.response_format.type != "text":
            asked["response_format"] = self.response_format.grammar()
        if len(asked) > 1:
            raise RequestError(f"{', '.join(asked)} exclude each other", list(asked)[1])
        for grammar in asked.values():
            return StructuredOutputsParams(**grammar)
        return None


class CompletionRequest(GenerationRequest):
    prompt: Annotated[Any, AfterValidator(_prompts)]
    """After validation a list of prompts, each a text or token ids."""
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
    use_beam_search: Literal[False] | None = None

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


class ChatMessage(_Strict):
    """One turn. Fields that a client copies from an answer are taken while they are empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_message_text)]
    name: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None
    tool_calls: Annotated[list[Any] | None, Field(max_length=0)] = None

    def for_template(self) -> dict[str, str]:
        role = "system" if self.role == "developer" else self.role
        kept = {"content", "name", "reasoning_content"}
        return {"role": role, **self.model_dump(include=kept, exclude_none=True)}


class TemplateFields(_Strict):
    """How messages become a prompt. add_generation_prompt: open the answer (the default)."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

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
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None

    def check(self) -> None:
        super().check()
        self.check_template_fields()
        for offered, choice in (("tools", "tool_choice"), ("functions", "function_call")):
            wish = getattr(self, choice)
            if wish not in (None, "none", "auto") or (getattr(self, offered) and wish != "none"):
                raise RequestError(
                    f'{offered} are not supported: leave them out or set {choice} to "none"',
                    offered,
                )
        if self.modalities not in (None, ["text"]):
            raise RequestError('modalities takes ["text"] only', "modalities")
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(
                f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}, not {self.top_logprobs}",
                "top_logprobs",
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
    tokens: Annotated[list[int], AfterValidator(_token_ids)]
