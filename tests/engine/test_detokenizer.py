"""Pieces of text join to the whole, never split a character, and never show a stop text."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import CORPUS, make_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from vllm.engine.detokenizer import Detokenizer, StopTexts, decoder, has_own_texts

TOKENIZER = make_tokenizer()
TEXTS = st.text(
    alphabet=st.one_of(
        st.sampled_from("ab éß日本🙂👩‍👩‍👧 \n"),
        st.characters(codec="utf-8", exclude_characters="�"),
    ),
    max_size=40,
)


OWN_TEXTS: dict[int, str] = {}  # of TOKENIZER, shared by all tests as by all requests


def pieces(
    prompt: list[int], tokens: list[int], sizes: list[int], texts: dict[int, str] | None = OWN_TEXTS
) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER, prompt, True, True, texts)
    result, start = [], 0
    while start < len(tokens):
        size = sizes[len(result) % len(sizes)]
        chunk = tokens[start : start + size]
        start += size
        result.append(detokenizer.add(chunk, is_last=start >= len(tokens)))
    return result


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, prompt=TEXTS, sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_pieces_join_to_the_text_and_hold_whole_characters(text, prompt, sizes):
    tokens = TOKENIZER(text).input_ids
    parts = pieces(TOKENIZER(prompt).input_ids, tokens, sizes)
    assert "".join(parts) == text
    assert not any("�" in part for part in parts)


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.integers(0, TOKENIZER.vocab_size + 3), max_size=30),
    prompt=st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=8),
    sizes=st.lists(st.integers(1, 2), min_size=1, max_size=3),
)
@example(tokens=[0, 100], prompt=[132], sizes=[1])
def test_pieces_are_the_same_where_texts_of_tokens_are_kept(tokens, prompt, sizes):
    """Of any tokens: bytes that are no characters, special ones, and some that no text has."""
    assert has_own_texts(TOKENIZER)
    assert pieces(prompt, tokens, sizes) == pieces(prompt, tokens, sizes, None)


def test_a_character_of_several_tokens_comes_with_its_last_one():
    tokens = TOKENIZER("🦜").input_ids
    assert len(tokens) > 1
    assert pieces([], tokens, [1]) == [*[""] * (len(tokens) - 1), "🦜"]


def test_bytes_that_are_no_character_come_out_at_the_end_and_not_only_then():
    broken = TOKENIZER("🦜").input_ids[:1]
    assert pieces([], broken, [1]) == ["�"]
    many = pieces([], broken * 200, [1])
    assert "".join(many) == "�" * 200
    assert any(many[:-1]), "an endless run of broken bytes must not be held back for ever"


def test_special_tokens_are_left_out_unless_asked_for():
    tokens = [*TOKENIZER("fox").input_ids, TOKENIZER.eos_token_id]
    assert Detokenizer(TOKENIZER, [], True, True).add(tokens, is_last=True) == "fox"
    assert Detokenizer(TOKENIZER, [], False, True).add(tokens, is_last=True) == "fox<|end|>"


class OwnTokenizer(PreTrainedTokenizerFast):
    """Writes its texts in its own way, as tokenizers of checkpoints may."""

    def _decode(self, token_ids, **options):
        return super()._decode(token_ids, **options).upper()


@pytest.mark.parametrize("cleans", [False, True])
@pytest.mark.parametrize("kind", [PreTrainedTokenizerFast, OwnTokenizer])
def test_tokens_are_decoded_as_the_tokenizer_itself_does(kind, cleans):
    words = Tokenizer(models.WordLevel({"one": 0, ".": 1, "<end>": 2}, unk_token="one"))
    tokenizer = kind(tokenizer_object=words, eos_token="<end>", clean_up_tokenization_spaces=cleans)
    for skips in (False, True):
        for tokens in ([], [0], [0, 1], [0, 1, 2]):
            text = tokenizer.decode(tokens, skip_special_tokens=skips)
            assert decoder(tokenizer, skips, True)(tokens) == text
    assert (
        tokenizer.decode([0, 1])
        == {
            (PreTrainedTokenizerFast, False): "one .",
            (PreTrainedTokenizerFast, True): "one.",
            (OwnTokenizer, False): "ONE .",
            (OwnTokenizer, True): "ONE.",
        }[kind, cleans]
    )


def feed(stops: StopTexts, text: str) -> tuple[str, str | None]:
    """Adds `text` character by character; returns what was shown and the stop that was found."""
    shown, so_far = "", ""
    for character in text:
        num_old = len(so_far)
        so_far += character
        hit = stops.find(so_far, num_old)
        if hit is not None:
            return shown + so_far[len(shown) : hit[0]], hit[1]
        shown += so_far[len(shown) : stops.num_safe(so_far)]
        assert so_far.startswith(shown)
    return shown + so_far[len(shown) :], None


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abc", max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_output_ends_at_the_first_stop_text_to_complete(text, stops, include):
    shown, found = feed(StopTexts(stops, include), text)
    ends = sorted((text.find(stop) + len(stop), stop) for stop in stops if stop in text)
    if not ends:
        assert (shown, found) == (text, None)
        return
    end = ends[0][0]
    candidates = [stop for stop in stops if text[:end].endswith(stop)]
    assert found == max(candidates, key=len)
    assert shown == (text[:end] if include else text[: end - len(found)])


def test_text_that_may_begin_a_stop_is_held_back_and_no_more():
    stops = StopTexts(["</end>"], include=False)
    assert stops.num_safe("hello") == 5
    assert stops.num_safe("hello </e") == 6
    assert stops.num_safe("hello </ex") == 10


@pytest.mark.parametrize("text", CORPUS)
def test_whole_text_at_once_equals_token_by_token(text):
    tokens = TOKENIZER(text).input_ids
    assert "".join(pieces([], tokens, [1])) == "".join(pieces([], tokens, [len(tokens)])) == text


def test_a_first_word_keeps_its_space():
    words = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1}, unk_token="▁one"))
    words.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert tokenizer.decode([0, 1]) == "one two" and not has_own_texts(tokenizer)
    detokenizer = Detokenizer(tokenizer, [0], True, True)
    assert [detokenizer.add([1]), detokenizer.add([0])] == [" two", " one"]
