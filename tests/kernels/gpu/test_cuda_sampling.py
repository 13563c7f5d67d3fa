"""The CUDA sampler draws the same tokens as the reference, which sorts in float64.

But where the point that is drawn lies so near to the end of a token's share that the rounding of
weights to float32 may decide.
"""

import pytest
import torch
from torch import Tensor

from vllm.ops import torch_ops

DEVICE = "cuda"
TOLERANCE = 2.0**-20  # of the mass: of its weights' rounding, 2^-21 each
pytestmark = pytest.mark.gpu
# One for each way through the kernel: ragged and aligned rows, less than a rank's share, a row that
# is staged in shared memory and one that does not fit.
VOCABS = (1, 5, 16, 511, 4097, 50257, 151936, 600_001)
SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.5},
    {"temperature": 0.01, "top_p": 0.9},
    {"temperature": 30.0, "top_p": 0.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 3000},
    {"top_p": 0.9},
    {"top_p": 0.1},
    {"top_p": 0.0},
    {"top_p": 0.9999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 0.8},
]


@pytest.fixture(scope="module")
def sample():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    from vllm.kernels import cuda_ops

    return lambda logits, *rest: cuda_ops.sample_tokens(logits, *(t.to(DEVICE) for t in rest))


def rows(num_rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return (
        torch.full((num_rows,), temperature),
        torch.full((num_rows,), top_k),
        torch.full((num_rows,), top_p),
        torch.full((num_rows,), min_p),
        torch.rand(num_rows, dtype=torch.float64),
    )


def assert_as_reference(given: Tensor, logits: Tensor, settings: tuple[Tensor, ...]) -> None:
    *filters, uniforms = settings
    first, last = (
        torch_ops.sample_tokens(logits.float(), *filters, (uniforms + shift).clamp(0, 1))
        for shift in (-TOLERANCE, TOLERANCE)
    )
    differing = ((given < first) | (given > last)).nonzero().flatten().tolist()
    assert not differing, [
        (r, given[r].item(), first[r].item(), last[r].item(), [s[r].item() for s in settings])
        for r in differing[:5]
    ]


def assert_equals_reference(sample, logits: Tensor, settings: tuple[Tensor, ...]) -> None:
    assert_as_reference(sample(logits.to(DEVICE), *settings).cpu(), logits, settings)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_tokens_equal_those_of_the_reference(sample, vocab, setting):
    num_rows = 3 if vocab > 10_000 else 60
    logits = torch.randn(num_rows, vocab) * 3
    assert_equals_reference(sample, logits, rows(num_rows, **setting))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_bfloat16_logits_are_full_of_ties(sample, setting):
    logits = (torch.randn(12, 5000) * 3).bfloat16()
    assert_equals_reference(sample, logits, rows(12, **setting))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_many_rows_of_a_whole_vocabulary_in_half_precision(sample, temperature):
    logits = (torch.randn(48, 151_936) * 3).bfloat16()
    assert_equals_reference(sample, logits, rows(48, temperature=temperature))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_rows_of_few_values_masked_rows_and_certain_ones(sample, setting):
    few = torch.randint(0, 4, (8, 3001)).float()
    equal = torch.full((2, 3001), -3.25)
    masked = torch.full((8, 3001), -torch.inf).scatter_(1, torch.randint(0, 3001, (8, 5)), 1.5)
    certain = torch.full((2, 3001), -1e9).scatter_(1, torch.tensor([[0], [3000]]), 20.0)
    nothing = torch.full((1, 3001), -torch.inf)
    logits = torch.cat((few, equal, masked, certain, nothing))
    assert_equals_reference(sample, logits, rows(len(logits), **setting))


@pytest.mark.parametrize("top_k", [2, 3, 500])
def test_more_than_asked_for_are_kept_where_they_tie_and_all_where_fewer_are_finite(sample, top_k):
    logits = torch.full((400, 1200), -torch.inf)
    logits[:, 100], logits[:, 300:310], logits[:, 1100] = 2.0, 1.0, -50.0
    assert_equals_reference(sample, logits, rows(400, top_k=top_k, temperature=5.0))


def test_probabilities_that_are_powers_of_two_are_cut_where_they_should_be(sample):
    logits = torch.arange(0, -20, -1).float().repeat(300, 1)
    for top_p in (0.4999, 0.5001, 0.7499, 0.7501):
        settings = rows(300, top_p=top_p, temperature=1 / 0.6931471805599453)
        assert_equals_reference(sample, logits, settings)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_unit_interval_give_the_first_and_the_last_token_kept(sample, uniform):
    logits = torch.full((1, 200_000), -torch.inf)
    logits[0, [5, 800, 190_000]] = 0.0
    settings = (*rows(1)[:4], torch.tensor([uniform], dtype=torch.float64))
    assert sample(logits.to(DEVICE), *settings).item() == (5 if uniform == 0 else 190_000)


def test_a_mixed_batch_equals_its_rows_alone_strided_and_misaligned(sample):
    logits = torch.randn(24, 30_000, device=DEVICE) * 3
    settings = (
        torch.tensor([0.0, 0.7, 1.3] * 8),
        torch.tensor([0, 5, 0, 50] * 6),
        torch.tensor([1.0, 0.8] * 12),
        torch.tensor([0.0, 0.0, 0.05, 0.0] * 6),
        torch.rand(24, dtype=torch.float64),
    )
    together = sample(logits, *settings)
    wide = torch.full((24, 30_003), torch.inf, device=DEVICE)
    wide[:, 3:] = logits
    assert torch.equal(sample(wide[:, 3:], *settings), together)
    alone = [sample(logits[r : r + 1], *(s[r : r + 1] for s in settings)) for r in range(24)]
    assert torch.equal(torch.cat(alone), together)
    assert_equals_reference(sample, logits.cpu(), settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_not_numbers_end_and_harm_no_other(sample, dtype):
    logits = torch.randn(5, 3000).to(dtype)
    logits[0], logits[1, 70], logits[1, 90] = torch.nan, torch.nan, torch.inf
    logits[2, 1000], logits[3] = torch.inf, -torch.inf
    for setting in SETTINGS:
        settings = rows(5, **setting)
        drawn = sample(logits.to(DEVICE), *settings).cpu()
        assert drawn[:4].tolist() == [0, 70, 1000, 0]
        assert_as_reference(drawn[4:], logits[4:], tuple(s[4:] for s in settings))


def test_no_rows_are_no_tokens(sample):
    assert sample(torch.empty(0, 100, device=DEVICE), *rows(0)).shape == (0,)


def test_tokens_come_as_often_as_their_probabilities_say(sample):
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125])
    num_rows = 20_000
    settings = (*rows(num_rows)[:4], torch.rand(num_rows, dtype=torch.float64))
    drawn = sample(probabilities.log().repeat(num_rows, 1).to(DEVICE), *settings).cpu()
    counts = torch.bincount(drawn, minlength=4) / num_rows
    torch.testing.assert_close(counts, probabilities, atol=0.015, rtol=0)
