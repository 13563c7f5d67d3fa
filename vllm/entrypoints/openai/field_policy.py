"""Fields that the HTTP API does not honour.

One that would change the answer is refused by name. One that could not, or that nobody knows, is
left out: the answer's header `Warning` names it, and /metrics counts it.
"""

from collections.abc import Collection, Iterable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from vllm.entrypoints.openai.errors import ApiError, invalid_fields, unknown_field

Body = TypeVar("Body", bound=BaseModel)

_NO_TEXT = "it says nothing about the text"

IGNORED_FIELDS = {
    "user": _NO_TEXT,
    "store": _NO_TEXT,
    "metadata": _NO_TEXT,
    "service_tier": _NO_TEXT,
    "safety_identifier": _NO_TEXT,
    "prompt_cache_key": "equal prefixes are found without it",
    "prompt_cache_retention": "prefixes stay cached until their memory is needed",
    "verbosity": "no model here knows it",
    "prediction": "it could only change the speed",
    "guided_decoding_backend": "xgrammar holds every grammar",
    "early_stopping": "a beam search ends when no beam can become better",
    "mm_processor_kwargs": "messages are text",
    "media_io_kwargs": "messages are text",
}
"""Fields of a request that cannot change its answer here, and why."""

REFUSED_FIELDS = {
    "vllm_xargs": "nothing here takes arguments of extensions; leave it out",
    "kv_transfer_params": "prompts are computed where they are answered; leave it out",
    "ec_transfer_params": "prompts are computed where they are answered; leave it out",
    "prompt_embeds": "give the prompt as text or token ids",
    "guided_whitespace_pattern": "give structured_outputs a grammar with this white space",
    "logits_processors": "use logit_bias, bad_words or allowed_token_ids",
    "audio": "answers are text; leave it out",
    "web_search_options": "give a tool that searches",
}
"""Fields of a request that would change its answer and are not honoured, and what to do instead."""

_MAX_WARNINGS = 8
_MAX_NAME = 64


def validated(kind: type[Body], fields: dict[str, Any], is_strict: bool = False) -> Body:
    """The request alone of `read_request`."""
    return read_request(kind, fields, is_strict)[0]


def ignored_fields(kind: type[BaseModel]) -> Collection[str]:
    """Of an API that is not OpenAI's older ones, its own."""
    own: Collection[str] = getattr(kind, "ignored_fields", IGNORED_FIELDS)
    return own


def read_request(
    kind: type[Body], fields: dict[str, Any], is_strict: bool = False
) -> tuple[Body, dict[str, str]]:
    """`fields` as a request of `kind`, and of those left out what to say, by name.

    ApiError 400 for wrong values, for fields that are not honoured though they would change the
    answer, and where `is_strict` for all that would be left out.
    """
    ignored = ignored_fields(kind)
    for name, instead in REFUSED_FIELDS.items():
        if fields.get(name) and name not in kind.model_fields:
            raise ApiError(400, f"{name} is not supported: {instead}", name)
    left_out = {
        name: f"{name} has no effect here: {IGNORED_FIELDS.get(name, _NO_TEXT)}"
        for name, value in fields.items()
        if name in ignored and value is not None
    }
    known = {
        name: value
        for name, value in fields.items()
        if name not in ignored and (name not in REFUSED_FIELDS or name in kind.model_fields)
    }
    try:
        body = kind.model_validate(known)
    except ValidationError as error:
        unknown = _unknown(error, kind)
        if is_strict or not unknown:
            raise invalid_fields(error, kind) from None
        for location in unknown:
            _remove(known, location)
        left_out |= {".".join(map(str, place)): text for place, text in unknown.items()}
        try:
            body = kind.model_validate(known)
        except ValidationError as others:
            raise invalid_fields(others, kind) from None
    if is_strict and left_out:
        name, text = next(iter(left_out.items()))
        raise ApiError(400, f"{text}; leave it out (--strict-requests)", name)
    return body, left_out


def _unknown(error: ValidationError, kind: type[BaseModel]) -> dict[tuple[str | int, ...], str]:
    """Places of unknown fields, each with a sentence."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    places = [problem["loc"] for problem in problems if problem["type"] == "extra_forbidden"]
    told = {place: f"{unknown_field(place, kind)} is ignored" for place in places[:_MAX_WARNINGS]}
    return told | dict.fromkeys(places[_MAX_WARNINGS:], "a further unknown field is ignored")


def _remove(fields: Any, location: tuple[str | int, ...]) -> None:
    for part in location[:-1]:
        fields = fields[part]
    del fields[location[-1]]


def warning_header(texts: Iterable[str]) -> str:
    """Value of the header `Warning` (RFC 7234, code 299: miscellaneous, persistent)."""
    shown = [*texts]
    if len(shown) > _MAX_WARNINGS:
        more = len(shown) - _MAX_WARNINGS
        shown = [*shown[:_MAX_WARNINGS], f"and {more} more"]
    return ", ".join(f'299 vllm "{_quoted(text)}"' for text in shown)


def _quoted(text: str) -> str:
    """Names of fields come from clients."""
    kept = text if len(text) <= 4 * _MAX_NAME else text[: 4 * _MAX_NAME] + "..."
    printable = "".join(char if " " <= char <= "~" else "?" for char in kept)
    return printable.replace("\\", "\\\\").replace('"', '\\"')
