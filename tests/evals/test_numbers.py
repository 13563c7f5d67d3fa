"""The last number of an answer."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.evals.numbers import last_digits, last_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 18", "18"),
        ("She makes $18 every day.\n#### 18\n\n", "18"),
        ("The answer is 42.", "42"),
        ("It costs $1,234,567.89.", "1234567.89"),
        ("12,345", "12345"),
        ("-7", "-7"),
        ("\u22127 degrees", "-7"),
        ("a loss of -$5", "-5"),
        ("a loss of $-5", "-5"),
        ("he has 10-3", "3"),
        ("(4)-3", "3"),
        ("50%-20%", "20"),
        ("= -3.50 dollars", "-3.50"),
        ("half is .5", "0.5"),
        ("1, 2, 3", "3"),
        ("choose 1,2", "2"),
        ("1,0000", "0"),
        ("007", "7"),
        ("18.00", "18"),
        ("**18**", "18"),
        ("\\boxed{18}", "18"),
        ("18 apples, as x2 said", "2"),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_the_last_number_is_read(text, number):
    assert last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "no idea", "$", "-", ".", "$,.", "eighteen", "\u0661\u0668"])
def test_a_text_without_digits_has_none(text):
    assert last_number(text) is None


@given(st.integers(-(10**12), 10**12), st.sampled_from(["", ".", "!", " dollars.", "\n\n", "%"]))
def test_any_whole_number_is_read_with_and_without_commas(number, ending):
    assert last_number(f"So 3 and 4 make {number}{ending}") == number
    assert last_number(f"So 3 and 4 make {number:,}{ending}") == number


@given(st.decimals(-10000, 10000, places=2))
def test_any_amount_is_read_with_its_cents(amount):
    assert last_number(f"5 each is {amount}.") == amount


@given(st.text())
def test_no_text_breaks_it(text):
    assert last_number(text) is None or isinstance(last_number(text), Decimal)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 18", "18"),
        ("It costs $1,234,567 in all.", "1234567"),
        ("-7", "7"),
        ("18.00", "0"),
        ("choose 1,2", "12"),
        ("x2 and 007", "7"),
    ],
)
def test_upstream_s_rule_reads_the_last_digits(text, number):
    assert last_digits(text) == Decimal(number)


def test_upstream_s_rule_finds_nothing_without_digits():
    assert last_digits("no idea, none") is None
