"""Triton's experts without a gate against the reference: FP8 blocks and 16 bits, whole and cut."""

import pytest
import torch
from triton_device import DEVICE, IS_INTERPRETED, MARKS

from vllm.architectures.decoder import RELU2
from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels.backends.triton import columns_per_scale
from vllm.kernels.numerics import MoECase
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import MoEProblem
from vllm.kernels.select.reason import Why
from vllm.kernels.triton.moe import Experts

pytestmark = MARKS
ACTS = {"bf16": ActScheme.NONE, "fp16": ActScheme.NONE, "fp8-block": ActScheme.DYNAMIC_GROUP128}
# Experts, top_k, hidden, intermediate and in how many shards it was cut; the last two are parts of
# a block of 128, of which a kernel takes 32 columns at a time.
SIZES = ((8, 2, 128, 64, 1), (4, 3, 128, 96, 2), (4, 3, 128, 40, 2))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("weight", ACTS)
@pytest.mark.parametrize("num_tokens", (1, 9, 40))
def test_experts_of_squared_relu_are_right(weight, size, num_tokens):
    *sizes, cut = size
    act = ACTS[weight]
    dtype = weight if weight != "fp8-block" else "bf16"
    stored = WeightFormat.parse(weight)
    problem = MoEProblem(*sizes, stored, (act,), dtype, cut=cut, activation=RELU2)
    if weight == "fp8-block" and problem.intermediate == 40:
        assert [reason.why for reason in columns_per_scale(problem)] == [Why.SHAPE]
        return
    assert not columns_per_scale(problem)
    candidate = Candidate("triton", act)
    case = MoECase.of(problem, candidate, torch.device(DEVICE), num_tokens)
    assert case.tensors.gate_up.shape[1] == problem.intermediate
    if IS_INTERPRETED and weight == "fp8-block":
        pytest.skip("Triton's interpreter computes no E4M3")
    kernel = Experts(problem, case.tensors)
    case.error(kernel, num_tokens, case.expected(num_tokens))
