"""The FP8 block GEMMs of Hopper with columns scaled at the end, for weights with a scale a row."""

import pytest
import torch
from test_block_gemm import Case, library, powers_of_two

pytestmark = pytest.mark.gpu
assert library  # a fixture


@pytest.mark.parametrize(
    "m, n, k",
    [(1, 576, 1040), (16, 1001, 1552), (33, 264, 8192), (100, 1001, 272), (300, 4240, 576),
     (1025, 2080, 1040)],
)  # fmt: skip
def test_columns_of_the_product_are_scaled(library, m, n, k):
    """Stored by each of the ways that there are: whole tiles, tall ones, sums of a cluster."""
    case = Case(m, n, k)
    columns = powers_of_two(n)
    expected = (case.product * columns.double()).bfloat16()
    operands = case.a, case.a_scales, case.b, case.b_scales, columns, None
    out = case.out()
    library.sm90_fp8_channel_gemm(*operands, out)
    assert torch.equal(out, expected)
    if m <= 16:
        out = case.out()
        library.skinny_fp8_channel_gemm(*operands, out)
        assert torch.equal(out, expected)
