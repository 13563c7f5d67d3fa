"""Prompts whose parts were tokenised before have the ids that the tokenizer gives them whole."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import make_tokenizer
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vllm.entrypoints.openai import segment_cache
from vllm.entrypoints.openai.segment_cache import SegmentCache

TOKENIZER = make_tokenizer()
SPECIAL = ["<s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
TOOLS = "a tool for each day of the week, é 中 " * 80
PARTS = [*SPECIAL, TOOLS, TOOLS[:900], "<|", "end|>", "\n\n", " ", "x", "é"]


class Counting:
    """TOKENIZER, with the characters that it was given."""

    def __init__(self):
        self.num_chars = 0

    def __getattr__(self, name):
        return getattr(TOKENIZER, name)

    def encode(self, text, **options):
        self.num_chars += len(text)
        return TOKENIZER.encode(text, **options)


@pytest.fixture
def tokenizer():
    return Counting()


def whole(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def chat(*turns: str) -> str:
    return "".join(f"<|user|>{turn}<|end|>" for turn in (TOOLS, *turns)) + "<|assistant|>"


def test_what_came_before_is_not_tokenised_again(tokenizer):
    cache = SegmentCache(tokenizer)
    assert cache.encode(chat("hello")) == whole(chat("hello"))
    before = tokenizer.num_chars
    assert cache.encode(chat("hello", "and the next turn")) == whole(
        chat("hello", "and the next turn")
    )
    assert tokenizer.num_chars - before < 60
    assert cache.encode(chat("another")) == whole(chat("another"))
    assert tokenizer.num_chars - before < 90


@given(st.lists(st.sampled_from(PARTS), max_size=12))
def test_ids_are_those_of_the_whole_text(parts):
    cache, text = SegmentCache(TOKENIZER), "".join(parts)
    assert cache.encode(text) == whole(text)
    for _ in range(2):
        random.Random(len(text)).shuffle(parts)
        text = "".join(parts)
        assert cache.encode(text) == whole(text)


def test_short_texts_are_not_kept(tokenizer):
    cache = SegmentCache(tokenizer)
    assert cache.encode("<|user|>hello") == whole("<|user|>hello")
    assert not cache._ids


def test_the_oldest_parts_are_forgotten(tokenizer, monkeypatch):
    most = 2 * len(TOOLS) + 1000  # two long parts, and a few short ones
    monkeypatch.setattr(segment_cache, "MAX_CACHED_CHARS", most)
    cache = SegmentCache(tokenizer)
    for number in range(4):
        text = f"<|user|>{number}{TOOLS}<|end|>"
        assert cache.encode(text) == whole(text)
        size = sum(len(part) + segment_cache.ENTRY_CHARS for part in cache._ids)
        assert cache._num_chars == size <= most
    before = tokenizer.num_chars
    cache.encode(f"<|user|>3{TOOLS}<|end|>")
    assert tokenizer.num_chars == before
    cache.encode(f"<|user|>0{TOOLS}<|end|>")
    assert tokenizer.num_chars > before


def test_a_special_token_that_takes_white_space_along_cuts_nothing():
    tokenizer = make_tokenizer()
    greedy = AddedToken("<|user|>", lstrip=True, rstrip=True, special=True, normalized=False)
    tokenizer.add_special_tokens({"additional_special_tokens": [greedy]})
    cache = SegmentCache(tokenizer)
    text = f"{TOOLS} <|user|> {TOOLS}<|end|>{TOOLS}"
    assert "<|user|>" not in [content for _, content in cache._special_tokens]
    assert cache.encode(text) == tokenizer.encode(text, add_special_tokens=False)


def test_a_tokenizer_that_looks_at_the_start_of_a_text_is_used_whole():
    inner = Tokenizer(models.BPE({"▁": 0, "a": 1, "▁a": 2, "<e>": 3, "b": 4}, [("▁", "a")]))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.add_special_tokens([AddedToken("<e>", special=True, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<e>")
    cache = SegmentCache(tokenizer)
    text = "a<e>a" * 1000
    assert cache._special_tokens and cache._special is None
    assert cache.encode(text) == tokenizer.encode(text, add_special_tokens=False)
    assert not cache._ids
