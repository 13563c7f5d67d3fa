"""Tokens that a request names: allowed ones, the ends of bad words, and their log-probabilities."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm import LLM, SamplingParams
from vllm.errors import RequestError
from vllm.ops import cpu_ops
from vllm.worker.sampler import SamplingBatch, ban_others, sample
from vllm.worker.token_limits import banned_next, both, mask_of


@pytest.fixture(scope="module")
def llm(text_checkpoint):
    return LLM(str(text_checkpoint), max_model_len=128, max_num_seqs=4)


def one(llm, prompt="the quick brown", **params):
    return llm.generate(prompt, SamplingParams(**params))[0].outputs[0]


@given(st.sets(st.integers(0, 69), min_size=1), st.just(70))
def test_a_mask_bans_all_tokens_but_those_allowed(allowed, vocab):
    logits = torch.zeros(2, vocab)
    ban_others(logits, {1: mask_of([*allowed], vocab)})
    assert not logits[0].any()
    assert set(torch.isfinite(logits[1]).nonzero()[:, 0].tolist()) == allowed


def test_a_mask_beside_a_grammar_leaves_what_both_allow_or_else_the_grammar():
    grammar = mask_of([1, 40], 64)
    assert both(None, grammar) is grammar
    assert torch.equal(both(grammar, mask_of([40, 41], 64)), mask_of([40], 64))
    assert torch.equal(both(grammar, mask_of([2], 64)), grammar)


def test_the_end_of_a_word_is_banned_after_its_begin_alone():
    words = [[5], [1, 2], [1, 2, 3], [9, 9]]
    assert banned_next(words, np.array([], np.int32)) == [5]
    assert banned_next(words, np.array([7, 1], np.int32)) == [5, 2]
    assert banned_next(words, np.array([7, 1, 2], np.int32)) == [5, 3]
    assert banned_next(words, np.array([2, 1, 7], np.int32)) == [5]


def test_named_tokens_are_reported_with_their_ranks():
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    rows = np.zeros(2)
    batch = SamplingBatch(
        temperature=rows.astype(np.float32), top_k=rows.astype(np.int64),
        top_p=np.ones(2, np.float32), min_p=rows.astype(np.float32),
        seeds=rows.astype(np.uint64), indices=rows.astype(np.int64),
        num_logprobs={0: 1, 1: 0}, named={1: [0, 2]},
    )  # fmt: skip
    _, entries = sample(logits.clone(), batch, cpu_ops)
    wanted = torch.log_softmax(logits, -1)
    assert entries[0].token_ids == [0, 0]
    assert entries[0].named_ranks == []
    assert entries[1].token_ids == [3, 0, 2]
    assert entries[1].logprobs == pytest.approx(wanted[1, [3, 0, 2]].tolist())
    assert entries[1].named_ranks == [4, 2]


def test_an_output_has_allowed_tokens_alone(llm):
    allowed = [3, 40, 77]
    out = one(llm, max_tokens=20, seed=1, ignore_eos=True, allowed_token_ids=allowed)
    assert set(out.token_ids) <= set(allowed)
    assert len(set(out.token_ids)) > 1
    with pytest.raises(RequestError, match="allowed_token_ids names token id 100000"):
        one(llm, allowed_token_ids=[100_000])


def test_a_bad_word_does_not_come_though_its_tokens_may(llm):
    free = one(llm, max_tokens=12, temperature=0, ignore_eos=True)
    tokenizer = llm.get_tokenizer()
    texts = [tokenizer.decode(free.token_ids[i : i + 2]) for i in range(2, 10)]
    word = next(
        text for i, text in enumerate(texts, 2)
        if tokenizer.encode(text, add_special_tokens=False) == free.token_ids[i : i + 2]
    )  # fmt: skip
    held = one(llm, max_tokens=12, temperature=0, ignore_eos=True, bad_words=[word])
    first, second = tokenizer.encode(word, add_special_tokens=False)
    pairs = [*zip(held.token_ids, held.token_ids[1:])]
    assert (first, second) in zip(free.token_ids, free.token_ids[1:])
    assert (first, second) not in pairs
    assert first in held.token_ids


def test_bad_words_of_one_token_never_come_whatever_else_is_in_the_batch(llm):
    free = one(llm, max_tokens=12, temperature=0, ignore_eos=True)
    tokenizer = llm.get_tokenizer()
    token, word = next(
        (token, tokenizer.decode([token])) for token in free.token_ids
        if tokenizer.encode(tokenizer.decode([token]), add_special_tokens=False) == [token]
    )  # fmt: skip
    params = [SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, bad_words=words)
              for words in (None, [word])]  # fmt: skip
    left, held = llm.generate(["the quick brown"] * 2, params)
    assert left.outputs[0].token_ids == free.token_ids
    assert token not in held.outputs[0].token_ids


def test_named_logprobs_are_those_of_all_tokens(llm):
    out = one(llm, max_tokens=3, temperature=0, logprob_token_ids=[5, 9, 5])
    wide = one(llm, max_tokens=3, temperature=0, logprobs=100)
    for place, all_places in zip(out.logprobs, wide.logprobs):
        assert set(place) >= {5, 9}
        for token in {5, 9} & set(all_places):
            assert place[token].logprob == pytest.approx(all_places[token].logprob, abs=1e-5)
            assert place[token].rank == all_places[token].rank


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bad_words", "text"), ("bad_words", [""]), ("bad_words", [5]),
        ("bad_words", ["x"] * 300), ("allowed_token_ids", []), ("allowed_token_ids", ["a"]),
        ("logprob_token_ids", [1.5]), ("logprob_token_ids", [*range(200)]),
    ],
)  # fmt: skip
def test_lists_of_another_kind_are_refused_by_name(field, value):
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
