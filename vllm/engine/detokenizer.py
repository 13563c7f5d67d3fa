"""Incremental detokenisation: never emits half a character or part of a stop text."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

# Prompt tokens decoded with the first output token: a token's text (such as a leading space) can
# depend on the tokens before it.
_CONTEXT = 6
# Bytes that form no character after this many tokens are emitted as they are.
_MAX_OPEN = 64
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Text of a growing token list; the joined pieces equal the text of the whole list. The last
    tokens are decoded again with each new one: a character may need several tokens.

    texts: of tokens by themselves, filled here and shared by requests of one tokenizer and
    `skip_special`; None where a token's text depends on those before it (`has_own_texts`).
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_token_ids: Sequence[int],
        skip_special: bool,
        spaces_between_special: bool,
        texts: dict[int, str] | None = None,
    ):
        self._texts = texts
        self._decode = decoder(tokenizer, skip_special, spaces_between_special)
        self._move_to(list(prompt_token_ids[-_CONTEXT:]))

    def _move_to(self, context: list[int]) -> None:
        """Continues after `context`, whose text has been emitted."""
        self._window = context
        self._num_context = len(context)
        self._num_given = len(self._decode(context))

    def add(self, token_ids: Sequence[int], is_last: bool = False) -> str:
        """The text that these tokens complete; with is_last, all held-back text too."""
        is_between = len(self._window) == self._num_context  # no character is begun
        if self._texts is not None and is_between and len(token_ids) == 1:
            own = self._own_text(token_ids[0])
            # After a token without text, bytes may go on with what the context ends in.
            if own and _REPLACEMENT not in own:
                if self._window:
                    self._window, self._num_context, self._num_given = [], 0, 0
                return own
        self._window += token_ids
        text = self._decode(self._window)
        num_new = len(self._window) - self._num_context
        is_open = text.endswith(_REPLACEMENT) and not is_last and num_new < _MAX_OPEN
        piece = (text.rstrip(_REPLACEMENT) if is_open else text)[self._num_given :]
        if is_open:
            self._num_given += len(piece)
        elif num_new > 0:
            self._move_to(self._window[self._num_context :])
        return piece

    def _own_text(self, token: int) -> str:
        assert self._texts is not None
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._decode([token])
        return text


def has_own_texts(tokenizer: Any) -> bool:
    """Whether the text of tokens is that of each, joined, but for characters of several tokens: of
    byte-level vocabularies."""
    rust = _plain_rust(tokenizer)
    return rust is not None and type(rust.decoder).__name__ == "ByteLevel"


def decoder(
    tokenizer: Any, skip_special: bool, spaces_between_special: bool
) -> Callable[[list[int]], str]:
    """Token ids to text. The Rust tokenizer is called directly where transformers adds nothing to
    it but checks, which take five times as long as decoding two tokens."""
    rust = _plain_rust(tokenizer)
    if rust is None:
        return partial(
            tokenizer.decode,
            skip_special_tokens=skip_special,
            spaces_between_special_tokens=spaces_between_special,
        )
    return partial(rust.decode, skip_special_tokens=skip_special)


def _plain_rust(tokenizer: Any) -> Any:
    """The tokenizer of the library `tokenizers`; None where transformers adds to its texts."""
    kind = type(tokenizer)
    is_plain = all(
        method.__module__.startswith("transformers.tokenization_utils")
        for method in (kind.decode, getattr(kind, "_decode", kind.decode))
    )
    rust = getattr(tokenizer, "backend_tokenizer", None)
    return rust if is_plain and rust and not tokenizer.clean_up_tokenization_spaces else None


class StopTexts:
    """Cuts a growing text at the first of `stops`; holds back a possible beginning of one."""

    def __init__(self, stops: Sequence[str], include: bool):
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, stops), default=0)

    def find(self, text: str, num_old: int) -> tuple[int, str] | None:
        """(length to keep, stop text) of the earliest stop that ends after text[:num_old]."""
        if not self._stops:
            return None
        hits = []
        for stop in self._stops:
            at = text.find(stop, max(0, num_old - len(stop) + 1))
            if at >= 0:
                hits.append((at, -len(stop), stop))
        if not hits:
            return None
        at, _, stop = min(hits)
        return (at + len(stop) if self._include else at), stop

    def num_safe(self, text: str) -> int:
        """Length of text that can be emitted: all but a suffix that could begin a stop text."""
        if self._include or not self._stops:
            return len(text)
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            ending = text[-length:]
            if any(stop.startswith(ending) for stop in self._stops):
                return len(text) - length
        return len(text)
