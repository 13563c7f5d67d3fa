"""Token ids of the parts of long prompts, for the next prompt that has the same parts.

Chats send their tools and their whole history with every turn. A fast tokenizer splits text at its
special tokens before it does anything else, so what lies between two of them has the same ids in
every prompt.
"""

import re
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from threading import Lock
from typing import Any

# Shorter texts are tokenised in less time than their parts are looked up.
LEAST_CHARS = 2048
MAX_CACHED_CHARS = 32 << 20  # about as much again in ids
# What an entry costs besides, so that many short parts do not take more memory than long ones.
ENTRY_CHARS = 256
# What is around a special token where a tokenizer that looks beyond it gives other ids.
_PROBES = ("a{}b", " {} x", "x \n{}\n\n y", "\n\n{} \t", "é{}中文 ", "{}{}1 23", "'{}'s")
NUM_PROBED = 16  # a tokenizer treats its special tokens alike


class SegmentCache:
    """Encodes as `tokenizer.encode(text, add_special_tokens=False)` does.

    tokenizer: of transformers; one that is not of the library `tokenizers`, or whose special tokens
    reach beyond themselves, encodes without a cache. template: of chats, which tells the special
    tokens that matter: a vocabulary may have thousands.
    """

    def __init__(self, tokenizer: Any, template: str | None = None):
        self._tokenizer = tokenizer
        self._template = template
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self._num_chars = 0
        self._lock = Lock()

    def encode(self, text: str) -> list[int]:
        if len(text) < LEAST_CHARS or self._special is None:
            return self._whole(text)
        segments = list(self._segments(text))
        with self._lock:
            known = [self._ids.get(segment) for segment in segments]
        ids: list[int] = []
        start = 0
        while start < len(segments):
            found = known[start]
            if found is not None:
                ids += found
                start += 1
                continue
            end = start + 1
            while end < len(segments) and known[end] is None:
                end += 1
            new = self._whole("".join(segments[start:end]))
            self._keep(segments[start:end], new)
            ids += new
            start = end
        with self._lock:
            for segment in segments:
                if segment in self._ids:
                    self._ids.move_to_end(segment)
        return ids

    def _whole(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _segments(self, text: str) -> Iterator[str]:
        """Each with the special token at its end."""
        assert self._special is not None
        ends = [match.end() for match in self._special.finditer(text)]
        for start, end in pairwise(dict.fromkeys([0, *ends, len(text)])):
            yield text[start:end]

    def _keep(self, segments: list[str], ids: list[int]) -> None:
        ends = [place + 1 for place, token in enumerate(ids) if token in self._special_ids]
        bounds = list(dict.fromkeys([0, *ends, len(ids)]))
        if len(bounds) != len(segments) + 1:
            return  # a token of the vocabulary is written as a special one
        with self._lock:
            for segment, (start, end) in zip(segments, pairwise(bounds)):
                if segment not in self._ids:
                    self._ids[segment] = array("I", ids[start:end])
                    self._num_chars += len(segment) + ENTRY_CHARS
            while self._num_chars > MAX_CACHED_CHARS:
                segment, _ = self._ids.popitem(last=False)
                self._num_chars -= len(segment) + ENTRY_CHARS

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(token_id for token_id, _ in self._special_tokens)

    @cached_property
    def _special_tokens(self) -> list[tuple[int, str]]:
        """Those of the template that end the text before them, whatever it is."""
        if getattr(self._tokenizer, "backend_tokenizer", None) is None:
            return []
        template = self._template or str(self._tokenizer.chat_template)
        added, eos = self._tokenizer.added_tokens_decoder, self._tokenizer.eos_token_id
        texts = "\n".join(token.content for token in added.values())
        return [
            (token_id, token.content)
            for token_id, token in added.items()
            if token.special and (token.content in template or token_id == eos)
            if not (token.normalized or token.lstrip or token.rstrip or token.single_word)
            if texts.count(token.content) == 1  # part of no other
        ]

    @cached_property
    def _special(self) -> "re.Pattern[str] | None":
        """Matches a special token, the longest there; None where text is not to be cut at them."""
        texts = sorted((text for _, text in self._special_tokens), key=len, reverse=True)
        if not texts:
            return None
        pattern = re.compile("|".join(map(re.escape, texts)))
        for text in texts[:NUM_PROBED]:
            for probe in _PROBES:
                whole = probe.replace("{}", text)
                cut = [0, *(match.end() for match in pattern.finditer(whole)), len(whole)]
                parts = [whole[start:end] for start, end in pairwise(cut) if start < end]
                if self._whole(whole) != [i for part in parts for i in self._whole(part)]:
                    return None
        return pattern
