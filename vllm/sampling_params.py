"""Parameters of one request: of sampling, or of pooling."""

import copy
from enum import IntEnum
from typing import Any

import msgspec

from vllm.errors import CheckpointError, RequestError, did_you_mean

MAX_LOGPROBS = 100
MAX_BEAMS = MAX_LOGPROBS // 2
MAX_LENGTH_PENALTY = 10  # an exponent of a length
MAX_CHOICES = 128
MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 256
MAX_LOGPROB_TOKEN_IDS = 128
_TEMPERATURE_FLOOR = 1e-5


class RequestOutputKind(IntEnum):
    """What each RequestOutput of a stream holds: all so far, what is new, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingType(IntEnum):
    """How tokens are drawn: the likeliest, with a fresh seed, or with the request's seed."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class StructuredOutputsParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """A grammar the output must match; exactly one of the fields is set.

    json: a JSON schema (dict or text). json_object: any JSON object. regex: a regular
    expression. choice: one of these texts. grammar: EBNF. structural_tag: tags with a grammar
    inside, in xgrammar's JSON. tool_calls: calls in a model's own format, the arguments of
    xgrammar's `get_model_structural_tag`, and as `or_else` a format that the answer may have
    instead.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    tool_calls: str | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        given = [f for f in self.__struct_fields__ if getattr(self, f) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"structured output takes exactly one of {', '.join(self.__struct_fields__)}; "
                f"given: {', '.join(given) or 'none'}",
                "structured_outputs",
            )


GuidedDecodingParams = StructuredOutputsParams
"""The older name."""


class SamplingParams(msgspec.Struct, omit_defaults=True):
    """Sampling settings, with OpenAI's names and meanings where it has them.

    temperature 0 is greedy. top_k 0 or -1 and top_p 1 keep every token; min_p drops tokens less
    likely than min_p times the likeliest. seed: the same seed gives the same text whatever else
    is in the batch; None draws a fresh one. stop: texts that end the output and are not part of
    it (unless include_stop_str_in_output). logprobs / prompt_logprobs: how many of the likeliest
    tokens to report per position besides the one taken (0: that one alone, -1: all tokens).
    max_tokens None: to the end of the context. bad_words: texts whose tokens the output must not
    have in a row, at its begin or after a space. allowed_token_ids: the only tokens of the output.
    logprob_token_ids: tokens to report per position besides those of logprobs. extra_args: no
    effect here.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    logprob_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        stop, ids = [self.stop] if isinstance(self.stop, str) else self.stop, self.stop_token_ids
        if isinstance(stop, list | tuple | None):
            self.stop = list(stop or ())
        if not isinstance(self.stop, list) or not all(isinstance(s, str) for s in self.stop):
            raise RequestError(f"stop must be a text or a list of texts, not {self.stop!r}", "stop")
        is_list = isinstance(ids, list | tuple | set | frozenset | None)
        if not is_list or not all(map(_is_integer, ids or ())):
            raise RequestError(
                f"stop_token_ids must be a list of token ids, not {ids!r}", "stop_token_ids"
            )
        self.stop_token_ids = list(ids or ())
        self._check_lists()
        self._check_types()
        self._check_ranges()
        if self.logprob_token_ids and self.logprobs is None:
            self.logprobs = 0

    @classmethod
    def from_optional(cls, **given: Any) -> "SamplingParams":
        """As the class itself, but None stands for the default of a field."""
        if unknown := given.keys() - {*cls.__struct_fields__}:
            name = sorted(unknown)[0]
            raise RequestError(
                f"SamplingParams has no {name!r}{did_you_mean(name, cls.__struct_fields__)}", name
            )
        return cls(**{name: value for name, value in given.items() if value is not None})

    def clone(self) -> "SamplingParams":
        """A copy that shares no list with this one."""
        return copy.deepcopy(self)

    @property
    def sampling_type(self) -> SamplingType:
        if self.is_greedy:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def stop_strings(self) -> list[str]:
        assert isinstance(self.stop, list)
        return self.stop

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _TEMPERATURE_FLOOR

    @property
    def penalises(self) -> bool:
        """Whether tokens seen before change the logits."""
        return bool(
            self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        )

    @property
    def may_edit_logits(self) -> bool:
        """Whether the logits of any step are edited, beyond temperature and truncation."""
        return (
            self.penalises or bool(self.logit_bias) or self.min_tokens > 0 or bool(self.bad_words)
        )

    def _check_lists(self) -> None:
        bad, allowed, told = self.bad_words, self.allowed_token_ids, self.logprob_token_ids
        is_list = isinstance(bad, list | tuple | None)
        if not is_list or not all(isinstance(word, str) and word for word in bad or ()):
            raise RequestError(f"bad_words must be a list of texts, not {bad!r}", "bad_words")
        if len(bad or ()) > MAX_BAD_WORDS:
            raise RequestError(
                f"bad_words has {len(bad or ())} texts; it takes at most {MAX_BAD_WORDS}",
                "bad_words",
            )
        for name, ids in (("allowed_token_ids", allowed), ("logprob_token_ids", told)):
            is_list = isinstance(ids, list | tuple | set | frozenset | None)
            if not is_list or not all(map(_is_integer, ids or ())):
                raise RequestError(f"{name} must be a list of token ids, not {ids!r}", name)
        if allowed is not None and not allowed:
            raise RequestError(
                "allowed_token_ids is empty: no token would be left; name some or leave it out",
                "allowed_token_ids",
            )
        if len(told or ()) > MAX_LOGPROB_TOKEN_IDS:
            raise RequestError(
                f"logprob_token_ids has {len(told or ())} tokens; it takes at most "
                f"{MAX_LOGPROB_TOKEN_IDS}",
                "logprob_token_ids",
            )
        self.bad_words = [*bad] if bad else None
        self.allowed_token_ids = [*allowed] if allowed else None
        self.logprob_token_ids = [*dict.fromkeys(told)] if told else None

    def _check_types(self) -> None:
        for name, (kind, _, _) in _NUMBERS.items():
            value = getattr(self, name)
            is_left_out = value is None and name in _MAY_BE_NONE
            if is_left_out or _is_integer(value) or (kind is float and isinstance(value, float)):
                continue
            what = "an integer" if kind is int else "a number"
            what += " or None" * (name in _MAY_BE_NONE)
            raise RequestError(f"{name} must be {what}, not {value!r}", name)
        for name in _BOOLS:
            _check_bool(name, getattr(self, name))
        if self.logit_bias is not None and not _is_bias(self.logit_bias):
            raise RequestError(
                f"logit_bias must be numbers by token id, not {self.logit_bias!r}", "logit_bias"
            )
        asked = self.structured_outputs
        if asked is not None and not isinstance(asked, StructuredOutputsParams):
            raise RequestError(
                f"structured_outputs must be a StructuredOutputsParams, not {asked!r}",
                "structured_outputs",
            )

    def _check_ranges(self) -> None:
        for name, (_, low, high) in _NUMBERS.items():
            value, is_low_out = getattr(self, name), name in _ABOVE_LOW
            if value is not None and (not low <= value <= high or (is_low_out and value == low)):
                wanted = (
                    f"above {low} and at most {high}" if is_low_out else f"from {low} to {high}"
                )
                raise RequestError(f"{name} must be {wanted}, not {value}", name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                "min_tokens",
            )
        if "" in self.stop_strings or len(self.stop_strings) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop takes at most {MAX_STOP_STRINGS} texts, none of them empty", "stop"
            )
        if self.stop_strings and not self.detokenize:
            raise RequestError("stop texts need detokenize: without text none is found", "stop")
        if self.n > 1 and self.is_greedy:
            raise RequestError(
                f"n = {self.n} with temperature 0 would give the same text {self.n} times; "
                f"raise temperature or set n to 1",
                "n",
            )


class BeamSearchParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Settings of `LLM.beam_search`.

    A beam's score is the sum of its tokens' log-probabilities over length ** length_penalty, the
    end-of-sequence token not counted in the length. temperature has no effect: the
    log-probabilities are those of the model.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name, high in (("beam_width", MAX_BEAMS), ("max_tokens", 2**31 - 1)):
            value = getattr(self, name)
            if not _is_integer(value) or not 1 <= value <= high:
                raise RequestError(f"{name} must be an integer from 1 to {high}", name)
        for name in ("temperature", "length_penalty"):
            value = getattr(self, name)
            if not (_is_integer(value) or isinstance(value, float)):
                raise RequestError(f"{name} must be a number, not {value!r}", name)
        if not -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY:
            raise RequestError(
                f"length_penalty must be from -{MAX_LENGTH_PENALTY} to {MAX_LENGTH_PENALTY}",
                "length_penalty",
            )
        for name in ("ignore_eos", "include_stop_str_in_output"):
            _check_bool(name, getattr(self, name))


class PoolingParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Asks for one vector per prompt: the last hidden state of its last token.

    normalize: scale the vector to length 1.
    """

    normalize: bool = True

    def __post_init__(self) -> None:
        _check_bool("normalize", self.normalize)


def _is_bias(given: Any) -> bool:
    return isinstance(given, dict) and all(
        not isinstance(token, bool) and (_is_integer(bias) or isinstance(bias, float))
        for token, bias in given.items()
    )


def _is_integer(value: object) -> bool:
    """True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be True or False, not {value!r}", name)


_BOOLS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
# Type, lowest and highest value.
_NUMBERS: dict[str, tuple[type, float, float]] = {
    "n": (int, 1, MAX_CHOICES),
    "temperature": (float, 0, 100),
    "top_k": (int, -1, 2**31 - 1),
    "min_p": (float, 0, 1),
    "max_tokens": (int, 0, 2**31 - 1),
    "min_tokens": (int, 0, 2**31 - 1),
    "seed": (int, -(2**63), 2**63 - 1),
    "logprobs": (int, -1, MAX_LOGPROBS),
    "prompt_logprobs": (int, -1, MAX_LOGPROBS),
    "presence_penalty": (float, -2, 2),
    "frequency_penalty": (float, -2, 2),
    "top_p": (float, 0, 1),
    "repetition_penalty": (float, 0.01, 100),  # beyond, logits become infinite
}
_MAY_BE_NONE = ("max_tokens", "seed", "logprobs", "prompt_logprobs")
_ABOVE_LOW = ("top_p",)  # which the lowest value itself is not for

_GENERATION_FIELDS = {
    name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
} | {"max_new_tokens": "max_tokens"}


def generation_defaults(generation: dict[str, Any]) -> dict[str, Any]:
    """Sampling defaults in a generation_config.json, by our names. do_sample false is greedy.
    CheckpointError for values that no request may have."""
    defaults = {
        ours: generation[theirs]
        for theirs, ours in _GENERATION_FIELDS.items()
        if generation.get(theirs) is not None
    }
    if generation.get("do_sample") is False:
        defaults["temperature"] = 0.0
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise CheckpointError(f"generation_config.json: {error}") from error
    return defaults


def default_sampling_params(generation: dict[str, Any]) -> SamplingParams:
    """SamplingParams with the model's own defaults; CheckpointError if those are invalid."""
    return SamplingParams(**generation_defaults(generation))
