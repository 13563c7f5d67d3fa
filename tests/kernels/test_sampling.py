"""The native sampler draws the same tokens as the reference, which sorts."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.ops import cpu_ops, torch_ops

VOCABS = (1, 5, 16, 511, 513, 4097, 49152)


def rows(num_rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return (
        torch.full((num_rows,), temperature),
        torch.full((num_rows,), top_k),
        torch.full((num_rows,), top_p),
        torch.full((num_rows,), min_p),
        torch.rand(num_rows, dtype=torch.float64),
    )


@cache
def reference(vocab: int, *setting: tuple[str, float]):
    """(logits, settings, tokens that the reference draws), once for all instruction sets."""
    num_rows = 40 if vocab > 10_000 else 200
    logits, settings = torch.randn(num_rows, vocab) * 3, rows(num_rows, **dict(setting))
    return logits, settings, torch_ops.sample_tokens(logits, *settings)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 1.5},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 3000},
        {"top_p": 0.9},
        {"top_p": 0.1},
        {"top_p": 0.9999},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 0.8},
    ],
    ids=str,
)
def test_tokens_equal_those_of_the_reference(isa, vocab, setting):
    logits, settings, wanted = reference(vocab, *setting.items())
    drawn = cpu_ops.sample_tokens(logits, *settings)
    # Rounding may move a draw that falls between two tokens.
    assert float((drawn == wanted).double().mean()) >= 0.97


def test_a_mixed_batch_equals_its_rows_alone(isa):
    logits = torch.randn(24, 3000) * 2
    settings = (
        torch.tensor([0.0, 0.7, 1.3] * 8),
        torch.tensor([0, 5, 0, 50] * 6),
        torch.tensor([1.0, 0.8] * 12),
        torch.tensor([0.0, 0.0, 0.05, 0.0] * 6),
        torch.rand(24, dtype=torch.float64),
    )
    together = cpu_ops.sample_tokens(logits, *settings)
    for i in range(24):
        alone = cpu_ops.sample_tokens(logits[i : i + 1], *(s[i : i + 1] for s in settings))
        assert alone[0] == together[i]


def test_every_instruction_set_draws_the_same_tokens():
    from vllm.platforms import native

    logits = torch.randn(100, 5000) * 2
    settings = rows(100, temperature=0.9, top_k=100, top_p=0.95)
    default = native.load().cpu_isa()
    drawn = []
    for name in ("avx512", "avx2"):
        try:
            native.load(name)
        except ValueError:
            continue
        drawn.append(cpu_ops.sample_tokens(logits, *settings))
    native.load(default)
    assert all(torch.equal(tokens, drawn[0]) for tokens in drawn)


def test_equally_likely_tokens_are_kept_together(isa):
    logits = torch.zeros(2000, 8)
    logits[:, 3:] = -1.0
    drawn = cpu_ops.sample_tokens(logits, *rows(2000, top_k=2)).bincount(minlength=8)
    assert (drawn[:3] > 500).all() and drawn[3:].sum() == 0


def test_forbidden_tokens_are_never_drawn(isa):
    logits = torch.full((500, 1000), -torch.inf)
    logits[:, 700:703] = torch.randn(500, 3)
    for setting in ({}, {"top_p": 0.99}, {"top_k": 500}, {"min_p": 0.001}):
        drawn = cpu_ops.sample_tokens(logits, *rows(500, **setting))
        assert ((drawn >= 700) & (drawn < 703)).all()


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_unit_interval_give_the_first_and_the_last_token_kept(isa, uniform):
    logits = torch.full((1, 2000), -torch.inf)
    logits[0, [5, 800, 1900]] = 0.0
    settings = (*rows(1)[:4], torch.tensor([uniform], dtype=torch.float64))
    assert cpu_ops.sample_tokens(logits, *settings)[0] == (5 if uniform == 0 else 1900)


def test_a_row_with_nothing_to_choose_from_ends_and_harms_no_other(isa):
    logits = torch.randn(3, 100)
    logits[0], logits[1] = -torch.inf, torch.nan
    settings = rows(3, top_p=0.5)
    drawn = cpu_ops.sample_tokens(logits, *settings)
    assert (drawn >= 0).all() and (drawn < 100).all()
    assert drawn[2] == cpu_ops.sample_tokens(logits[2:], *(s[2:] for s in settings))[0]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(1, 60),
    top_k=st.integers(0, 70),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_only_tokens_that_the_filters_keep_are_drawn(seed, vocab, top_k, top_p, min_p):
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed)).double()
    order = logits[0].sort(descending=True)
    weights = torch.exp(order.values - order.values[0])
    kept = weights >= min_p - 1e-5
    if 0 < top_k < vocab:
        kept &= weights >= weights[top_k - 1] - 1e-6
        mass = weights[:top_k].sum()
    else:
        mass = weights.sum()
    before = weights.cumsum(0) - weights
    kept &= before <= top_p * mass * (1 + 1e-5)
    one = rows(1, top_k=top_k, top_p=top_p, min_p=min_p)
    for uniform in (0.0, 0.3, 0.7, 0.999999):
        settings = (*one[:4], torch.tensor([uniform], dtype=torch.float64))
        token = int(cpu_ops.sample_tokens(logits.float(), *settings)[0])
        assert token in order.indices[kept].tolist()


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("temperature", 0, torch.zeros(3)),
        ("top_k", 1, torch.zeros(2, dtype=torch.int32)),
        ("top_p", 2, torch.zeros(2, dtype=torch.float64)),
        ("uniforms", 4, torch.zeros(2)),
    ],
)
def test_a_wrong_argument_is_named(name, index, value):
    settings = list(rows(2))
    settings[index] = value
    with pytest.raises(ValueError, match=name):
        cpu_ops.sample_tokens(torch.zeros(2, 5), *settings)
