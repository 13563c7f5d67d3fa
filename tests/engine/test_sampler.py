"""Sampling: filters keep what they promise, and a row never depends on its batch."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.ops import cpu_ops
from vllm.worker import sampler
from vllm.worker.numerics import BROKEN, mark_broken
from vllm.worker.sampler import RowEdits, SamplingBatch, gather_logprobs, uniforms

VOCAB = 50


def sample(logits, settings):
    return sampler.sample(logits, settings, cpu_ops)


def batch(num_rows: int, seeds=None, indices=None, **changes) -> SamplingBatch:
    fields = {
        "temperature": np.ones(num_rows, np.float32),
        "top_k": np.zeros(num_rows, np.int64),
        "top_p": np.ones(num_rows, np.float32),
        "min_p": np.zeros(num_rows, np.float32),
        "seeds": np.arange(num_rows, dtype=np.uint64) if seeds is None else seeds,
        "indices": np.zeros(num_rows, np.int64) if indices is None else indices,
    }
    for name, value in changes.items():
        if isinstance(fields.get(name), np.ndarray):
            value = np.full(num_rows, value, fields[name].dtype)
        fields[name] = value
    return SamplingBatch(**fields)


def logits_of(num_rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def draw_many(row: torch.Tensor, count: int = 20_000, **settings) -> np.ndarray:
    """Frequencies of tokens over `count` seeds for one row of logits."""
    seeds = np.arange(count, dtype=np.uint64)
    tokens, _ = sample(row.expand(count, -1).clone(), batch(count, seeds, **settings))
    return np.bincount(tokens, minlength=len(row)) / count


def test_temperature_zero_takes_the_likeliest_token():
    logits = logits_of(5)
    tokens, _ = sample(logits.clone(), batch(5, temperature=0))
    assert tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    row = logits_of(1)[0]
    wanted = torch.softmax(row / temperature, -1).numpy()
    assert np.abs(draw_many(row, temperature=temperature) - wanted).max() < 0.015


def test_top_k_keeps_the_k_likeliest_in_their_proportions():
    row = logits_of(1)[0]
    kept = row.topk(3).indices
    wanted = torch.zeros(VOCAB)
    wanted[kept] = torch.softmax(row[kept], -1)
    assert np.abs(draw_many(row, top_k=3) - wanted.numpy()).max() < 0.015


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    row = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    frequencies = draw_many(row, top_p=0.75)
    assert np.abs(frequencies - [0.625, 0.375, 0, 0]).max() < 0.015


def test_min_p_drops_what_is_less_likely_than_its_share_of_the_likeliest():
    row = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    frequencies = draw_many(row, min_p=0.5)
    assert np.abs(frequencies - [0.625, 0.375, 0, 0]).max() < 0.015


def test_top_p_counts_the_mass_that_top_k_left():
    row = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    frequencies = draw_many(row, top_k=2, top_p=0.5)
    assert frequencies.tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("setting", [{"top_p": 0.999}, {"min_p": 1e-9}, {"top_k": 2000}])
def test_filters_that_keep_nearly_everything_see_the_whole_vocabulary(setting):
    row = torch.zeros(4000)
    frequencies = draw_many(row, 3000, **setting)
    assert (frequencies > 0).sum() > 1200


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), size=st.integers(1, 9))
def test_a_row_gets_the_same_token_alone_and_in_any_batch(seed, size):
    rng = np.random.default_rng(seed)
    logits = logits_of(size, seed)
    full = batch(
        size,
        seeds=rng.integers(0, 2**63, size).astype(np.uint64),
        indices=rng.integers(0, 100, size),
    )
    full.temperature = rng.choice([0, 0.7, 1.3], size).astype(np.float32)
    full.top_k = rng.choice([0, 5], size)
    full.top_p = rng.choice([1, 0.8], size).astype(np.float32)
    together, _ = sample(logits.clone(), full)
    for row in range(size):
        one = slice(row, row + 1)
        alone, _ = sample(
            logits[one].clone(),
            SamplingBatch(
                full.temperature[one],
                full.top_k[one],
                full.top_p[one],
                full.min_p[one],
                full.seeds[one],
                full.indices[one],
            ),
        )
        assert alone[0] == together[row]


def test_uniforms_are_the_published_splitmix64_sequence():
    """First outputs for seed 1234567, from the generator's reference implementation."""
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    got = uniforms(np.full(3, 1234567, np.uint64), np.arange(3))
    assert np.array_equal(got, (np.array(wanted, np.uint64) >> np.uint64(11)) * 2.0**-53)


def test_penalties_change_the_logits_as_defined():
    logits = torch.zeros(1, 6)
    logits[0] = torch.tensor([2.0, -2.0, 1.0, 1.0, 1.0, 1.0])
    edit = RowEdits(
        0,
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        history=np.array([0, 1, 2, 2]),
        output=np.array([2, 2]),
    )
    sample(logits, batch(1, temperature=0, edits=[edit]))
    assert logits[0].tolist() == [1.0, -4.0, 0.5 - 0.5 - 0.5, 1.0, 1.0, 1.0]


def test_bias_and_bans_decide_greedy_choice():
    logits = torch.zeros(2, 6)
    edits = [RowEdits(0, logit_bias={4: 5.0}), RowEdits(1, logit_bias={4: 5.0}, banned=(4,))]
    tokens, _ = sample(logits, batch(2, temperature=0, edits=edits))
    assert tokens[0] == 4 and tokens[1] != 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [{}, {7: 4.1}])
def test_logits_of_any_type_give_what_the_same_numbers_in_float32_give(dtype, bias):
    logits = logits_of(6).to(dtype)
    settings = batch(6, temperature=0.8, num_logprobs={0: 2, 4: 3})
    settings.edits = [RowEdits(row, logit_bias=bias) for row in (0, 1, 2) if bias]
    wanted = sample(logits.float(), settings)
    before = logits.clone()
    tokens, logprobs = sample(logits, settings)
    assert tokens.tolist() == wanted[0].tolist() and logprobs == wanted[1]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_without_an_allowed_token_is_broken_in_any_type(dtype):
    settings = batch(2, temperature=0)
    settings.bitmasks = dict(enumerate(torch.tensor([[0, 0], [1 << 7, 0]], dtype=torch.int32)))
    logits = sampler.widened(logits_of(2).to(dtype), settings, cpu_ops)
    tokens, _ = sample(logits, settings)
    assert mark_broken(logits, tokens).tolist() == [BROKEN, 7]


def test_logprobs_are_of_the_raw_distribution_and_rank_the_token_taken():
    logits = logits_of(2)
    raw = torch.log_softmax(logits, -1)
    changed = batch(2, temperature=0, num_logprobs={1: 3})
    changed.edits = [RowEdits(1, logit_bias={int(logits[1].argmin()): 100.0})]
    tokens, logprobs = sample(logits, changed)
    assert list(logprobs) == [1]
    entry = logprobs[1]
    assert entry.token_ids[0] == tokens[1] and entry.rank == VOCAB
    assert entry.logprobs[0] == pytest.approx(raw[1].min().item())
    assert entry.token_ids[1:] == raw[1].topk(3).indices.tolist()


def test_asking_for_no_top_logprobs_gives_the_token_alone():
    logits = logits_of(1)
    entry = gather_logprobs(logits, torch.tensor([3]), [0])[0]
    assert entry.token_ids == [3] and len(entry.logprobs) == 1


@pytest.mark.parametrize("vocab", [32, 50, 4097])
def test_a_grammar_bans_what_its_bits_do_not_allow_in_its_own_rows(vocab):
    xgrammar = pytest.importorskip("xgrammar")
    words = torch.randint(-(2**31), 2**31, (2, -(-vocab // 32)), dtype=torch.int32)
    logits = logits_of(4, vocab=vocab)
    wanted = logits.clone()
    xgrammar.apply_token_bitmask_inplace(wanted[1:3], words, vocab_size=vocab)
    sampler.ban_others(logits, {1: words[0], 2: words[1]})
    assert torch.equal(logits, wanted) and logits.isinf().any()


def test_edits_of_rows_together_are_those_of_each_alone():
    rng = np.random.default_rng(0)

    def edit(row: int) -> RowEdits:
        history = rng.integers(0, VOCAB, 3 * row + 1).astype(np.int32)
        return RowEdits(
            row,
            logit_bias={row: 2.0, VOCAB - 1: -3.0} if row % 2 else None,
            banned=(row, 3, 3) if row % 3 == 0 else (),
            repetition_penalty=1.0 + 0.25 * (row % 4),
            presence_penalty=0.5 * (row % 3),
            frequency_penalty=0.25 * (row % 2),
            history=history,
            output=history[row:],
        )

    edits, logits = [edit(row) for row in range(7)], logits_of(9)
    together = logits.clone()
    sample(together, batch(9, temperature=0, edits=edits))
    for own in edits:
        alone = logits[own.row : own.row + 1].clone()
        sample(alone, batch(1, temperature=0, edits=[dataclasses.replace(own, row=0)]))
        assert torch.equal(together[own.row], alone[0])
    assert torch.equal(together[7:], logits[7:])
    changed = [(together[i] != logits[i]).any() for i in range(7)]
    assert all(changed[1:])
