"""Triton's experts on generated problems of few tokens, against the sum that the formats define.

All backends and sizes on a GPU: test_moe_backends_on_gpu.py.
"""

import pytest
from moe_cases import Case, check, generate
from triton_device import DEVICE, IS_INTERPRETED, MARKS

from vllm.kernels.select.decision import Candidate

pytestmark = MARKS
CASES = [case for case in generate(60, seed=1) if case.num_tokens <= 31]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_few_tokens_get_what_the_formats_say(case: Case):
    act = case.problem.act[-2 if case.problem.weight.is_quantized else 0]
    if IS_INTERPRETED and case.problem.weight.is_quantized:
        pytest.skip("the interpreter does not get through quantising within a product (Triton 3.9)")
    check(case, Candidate("triton", act), DEVICE)
