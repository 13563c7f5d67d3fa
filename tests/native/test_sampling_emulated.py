"""csrc's sampler, kernel and launch, run thread by thread on a CPU: by one thread block for each
row, and by a cluster of them. On a GPU: tests/kernels/gpu/test_cuda_sampling.py.
"""

import shutil
from pathlib import Path

import pytest
import torch
from native import emulated
from native.emulated import compiled
from slow import quick
from torch import Tensor

from vllm.ops import torch_ops

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
# Of Header in sampling.cpp.
FIELDS = [
    "type", "is_vector", "ptx_version", "num_rows", "vocab", "row_stride",
    "logits", "temperature", "top_k", "top_p", "min_p", "uniforms", "tokens",
]  # fmt: skip
TYPES = {torch.float32: 0, torch.bfloat16: 1}
# Ragged and aligned rows, ranks without any logits, rows that are staged and one that is not.
VOCABS = (1, 5, 16, 511, 4097, 60_007)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampling")
    # Apart from the real sampling_ptx.cuh, in whose place comes the emulated one.
    ignored = shutil.ignore_patterns("sampling_ptx.cuh")
    shutil.copytree(CSRC / "layers", folder / "csrc" / "layers", ignore=ignored)
    shutil.copy(CSRC / "launch.cuh", folder / "csrc")
    shutil.copy(HERE / "sampling.cpp", folder)
    return compiled(folder / "sampling.cpp", folder, "-ffp-contract=off")


@pytest.fixture(params=[80, 90], ids=["block", "cluster"])
def sample(request, program):
    def call(logits: Tensor, *settings: Tensor) -> Tensor:
        num_rows, vocab = logits.shape
        stride = logits.stride(0) if num_rows > 1 else vocab
        is_vector = stride * logits.element_size() % 16 == 0
        values = (TYPES[logits.dtype], int(is_vector), request.param, num_rows, vocab, stride)
        rows = torch.as_strided(logits, (num_rows * stride,), (1,), logits.storage_offset())
        tokens = torch.full((num_rows,), -1)
        tensors = dict(zip(FIELDS[6:], (rows, *settings, tokens), strict=True))
        return emulated.call(program, FIELDS, dict(zip(FIELDS, values)), tensors, "tokens")

    return call


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def mixed(num_rows: int) -> tuple[Tensor, ...]:
    """Settings of rows, among them greedy ones, each filter alone and all together."""
    temperature = torch.tensor([0.7, 0.0, 1.5, 0.01, 30.0, 1.0, 1.0])
    top_k = torch.tensor([0, 5, 1, 0, 7, 0, 3000, 40, 0])
    top_p = torch.tensor([1.0, 0.9, 1.0, 0.1, 0.0, 0.9999, 1.0, 0.8, 1.0, 0.5, 1.0])
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 1.0, 0.0, 0.02, 0.0, 0.0, 0.0, 0.0])
    cut = [values.repeat(num_rows)[:num_rows] for values in (temperature, top_k, top_p, min_p)]
    return (*cut, torch.rand(num_rows, dtype=torch.float64))


def assert_equals_reference(sample, logits: Tensor, settings: tuple[Tensor, ...]) -> None:
    given = sample(logits, *settings)
    wanted = torch_ops.sample_tokens(logits.float(), *settings)
    differing = (given != wanted).nonzero().flatten().tolist()
    assert not differing, [
        (r, given[r].item(), wanted[r].item(), [s[r].item() for s in settings])
        for r in differing[:5]
    ]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocab", quick(VOCABS, VOCABS[::4]))
def test_tokens_equal_those_of_the_reference(sample, dtype, vocab):
    num_rows = 3 if vocab > 10_000 else 13
    logits = (torch.randn(num_rows, vocab) * 3).to(dtype)
    assert_equals_reference(sample, logits, mixed(num_rows))


def test_a_whole_vocabulary_of_half_precision(sample):
    assert_equals_reference(sample, (torch.randn(2, 151_936) * 3).bfloat16(), mixed(2))


def test_rows_of_few_values_masked_rows_and_certain_ones(sample):
    few = torch.randint(0, 4, (13, 3001)).float()
    equal = torch.full((3, 3001), -3.25)
    masked = torch.full((8, 3001), -torch.inf).scatter_(1, torch.randint(0, 3001, (8, 5)), -1.5)
    certain = torch.full((2, 3001), -1e9).scatter_(1, torch.tensor([[0], [3000]]), 20.0)
    logits = torch.cat((few, equal, masked, certain))
    assert_equals_reference(sample, logits, mixed(len(logits)))


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_that_are_not_numbers_end_and_harm_no_other(sample, dtype):
    logits = torch.randn(14, 3000).to(dtype)
    logits[:4] = -torch.inf
    logits[4:8], logits[8:12, 70], logits[8:12, 90] = torch.nan, torch.nan, torch.inf
    settings = mixed(len(logits))
    drawn = sample(logits, *settings).tolist()
    assert drawn[:12] == [0] * 8 + [70] * 4
    rest = [s[12:] for s in settings]
    assert drawn[12:] == torch_ops.sample_tokens(logits[12:].float(), *rest).tolist()


@pytest.mark.parametrize("offset", [0, 3])
def test_rows_apart_and_misaligned_are_those_side_by_side(sample, offset):
    logits, settings = torch.randn(14, 600) * 3, mixed(14)
    wide = torch.full((14, 608 + offset), torch.inf)
    wide[:, :600] = logits
    assert torch.equal(sample(wide[:, :600], *settings), sample(logits, *settings))


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 5), (1 - 2.0**-53, 19_000)])
def test_the_ends_of_the_unit_interval_give_the_first_and_the_last_token_kept(
    sample, uniform, token
):
    logits = torch.full((2, 20_000), -torch.inf)
    logits[:, [5, 800, 19_000]] = -7.0
    settings = (torch.ones(2), torch.tensor([0, 3]), torch.ones(2), torch.zeros(2))
    draws = torch.full((2,), uniform, dtype=torch.float64)
    assert sample(logits, *settings, draws).tolist() == [token, token]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-4, 1e4, 1e9])
def test_temperatures_at_the_ends_of_their_range_equal_the_reference(sample, temperature):
    logits = torch.cat((torch.randn(8, 97) * 3, torch.randint(0, 3, (8, 97)).float()))
    settings = mixed(16)
    settings[0].fill_(temperature)
    assert_equals_reference(sample, logits, settings)
