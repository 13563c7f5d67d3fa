"""The host's integer arithmetic is that of Triton, which kernels are written against."""

import pytest

from vllm.utils.math_utils import cdiv, next_power_of_2, round_up

NUMBERS = [*range(1, 70), 127, 128, 129, 2048, 151_936, 2**31 - 1, 2**31]


@pytest.mark.parametrize("n", NUMBERS)
def test_integers_are_tritons(n: int) -> None:
    triton = pytest.importorskip("triton")
    assert next_power_of_2(n) == triton.next_power_of_2(n)
    for divisor in (1, 3, 16, 128):
        assert cdiv(n, divisor) == triton.cdiv(n, divisor)
        assert round_up(n, divisor) == triton.cdiv(n, divisor) * divisor


def test_no_tokens() -> None:
    assert (cdiv(0, 16), round_up(0, 16), next_power_of_2(0)) == (0, 0, 1)
