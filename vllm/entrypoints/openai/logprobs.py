"""Log-probabilities in the shapes of OpenAI's two APIs."""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from vllm.entrypoints.openai.prompts import Prompts
from vllm.outputs import Logprob, LogprobDict

# JSON has no minus infinity; a token that a grammar or bias rules out gets this instead.
_LOWEST = -9999.0

Position = tuple[int, LogprobDict | None]
"""A token id and the log-probabilities at its place; None where nothing precedes it."""


# Positions encoded to JSON at a time: the encoder holds the interpreter lock.
_PLACES = 64


def _encoded(entries: Sequence[Any]) -> msgspec.Raw:
    """A list as JSON, piece by piece."""
    pieces = (entries[i : i + _PLACES] for i in range(0, len(entries), _PLACES))
    return msgspec.Raw(b"[%b]" % b",".join(msgspec.json.encode(piece)[1:-1] for piece in pieces))


def positions(token_ids: Sequence[int], logprobs: Sequence[LogprobDict | None]) -> list[Position]:
    return list(zip(token_ids, logprobs, strict=True))


def completion_logprobs(
    places: Sequence[Position], first_offset: int, first_text: str = "", as_ids: bool = False
) -> tuple[dict[str, Any], int]:
    """`logprobs` of a completion, and how many characters of text they cover. first_offset:
    characters of its text before these tokens; first_text: text of a prompt's first token, which
    has no log-probability. as_ids: tokens are written `token_id:5`.

    top_logprobs is keyed by text: of tokens with equal text the likeliest is kept, so that the
    largest value is always that of the likeliest token.
    """
    tokens, token_logprobs, top_logprobs, offsets = [], [], [], []
    offset = first_offset
    for token_id, logprobs in places:
        text = first_text if logprobs is None else _text(token_id, logprobs[token_id])
        top: dict[str, float] = {}
        for other_id, logprob in _likeliest_first(logprobs):
            top.setdefault(_text(other_id, logprob, as_ids), _finite(logprob.logprob))
        tokens.append(_id_text(token_id) if as_ids else text)
        token_logprobs.append(None if logprobs is None else _finite(logprobs[token_id].logprob))
        top_logprobs.append(None if logprobs is None else top)
        offsets.append(offset)
        offset += len(text)
    shape = {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": _encoded(top_logprobs),
        "text_offset": offsets,
    }
    return shape, offset - first_offset


def chat_logprobs(
    places: Sequence[Position],
    num_top: int,
    prompts: Prompts,
    named: Collection[int] = (),
    as_ids: bool = False,
) -> dict[str, Any]:
    """`logprobs` of a chat choice, with the `num_top` likeliest tokens at each place and those
    that the request has `named`. as_ids: tokens are written `token_id:5`."""
    content = []
    for token_id, logprobs in places:
        assert logprobs is not None
        top = [
            _chat_entry(other_id, logprob, prompts, as_ids)
            for place, (other_id, logprob) in enumerate(_likeliest_first(logprobs))
            if place < num_top or other_id in named
        ]
        entry = _chat_entry(token_id, logprobs[token_id], prompts, as_ids)
        content.append({**entry, "top_logprobs": top})
    return {"content": _encoded(content), "refusal": None}


def prompt_logprobs_json(prompt_logprobs: Sequence[LogprobDict | None]) -> msgspec.Raw:
    """Per prompt token `{token id: {logprob, rank, decoded_token}}`, None for the first."""
    return _encoded([place and _finite_place(place) for place in prompt_logprobs])


def _finite_place(place: LogprobDict) -> LogprobDict:
    return {
        token_id: msgspec.structs.replace(entry, logprob=_finite(entry.logprob))
        for token_id, entry in place.items()
    }


def _id_text(token_id: int) -> str:
    return f"token_id:{token_id}"


def _text(token_id: int, logprob: Logprob, as_ids: bool = False) -> str:
    text = logprob.decoded_token
    return _id_text(token_id) if text is None or as_ids else text


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)


def _likeliest_first(logprobs: LogprobDict | None) -> list[tuple[int, Logprob]]:
    return sorted((logprobs or {}).items(), key=lambda item: -item[1].logprob)


def _chat_entry(token_id: int, logprob: Logprob, prompts: Prompts, as_ids: bool) -> dict[str, Any]:
    text = _text(token_id, logprob)
    return {
        "token": _id_text(token_id) if as_ids else text,
        "logprob": _finite(logprob.logprob),
        "bytes": prompts.token_bytes(token_id, text),
    }
