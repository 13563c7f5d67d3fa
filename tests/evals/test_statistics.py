"""Statistics against what is computed in another way."""

from fractions import Fraction
from itertools import product
from math import exp, log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from vllm.evals.paired import Budget, Position, compare, compare_answers, divergence
from vllm.evals.statistics import mcnemar_p, wilson_interval


@pytest.mark.parametrize("num_all", range(1, 13))
def test_mcnemar_is_the_share_of_coin_rows_at_least_as_uneven(num_all):
    """Every row of coins is counted: those whose split is no nearer to even than the given one."""
    rows = [sum(row) for row in product((0, 1), repeat=num_all)]
    for num_only_a in range(num_all + 1):
        distance = abs(2 * num_only_a - num_all)
        uneven = sum(abs(2 * heads - num_all) >= distance for heads in rows)
        expected = Fraction(uneven, len(rows))
        assert mcnemar_p(num_only_a, num_all - num_only_a) == pytest.approx(float(expected))


# scipy takes long for large counts.
@settings(max_examples=20)
@given(st.integers(0, 3000), st.integers(0, 3000))
def test_mcnemar_is_symmetric_and_equals_scipy_at_any_size(b, c):
    p = mcnemar_p(b, c)
    assert p == mcnemar_p(c, b)
    if b + c:
        assert p == pytest.approx(binomtest(b, b + c).pvalue, rel=1e-6, abs=1e-290)


def test_nothing_to_tell_apart_is_no_difference():
    assert mcnemar_p(0, 0) == 1.0
    assert mcnemar_p(5, 5) == 1.0


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_equals_scipy(counts):
    num_right, num_all = counts
    theirs = binomtest(num_right, num_all).proportion_ci(0.95, method="wilson")
    assert wilson_interval(num_right, num_all) == pytest.approx((theirs.low, theirs.high), abs=1e-9)


def test_the_interval_of_no_answers_is_everything():
    assert wilson_interval(0, 0) == (0.0, 1.0)


def distributions(size: int):
    weights = st.lists(st.floats(0.01, 10), min_size=size, max_size=size)
    return weights.map(lambda w: {i: log(x / sum(w)) for i, x in enumerate(w)})


def full_kl(p, q):
    return sum(exp(p[t]) * (p[t] - q[t]) for t in p)


def likeliest(p, k):
    return dict(sorted(p.items(), key=lambda item: -item[1])[:k])


@given(distributions(12), distributions(12))
def test_kl_over_all_tokens_is_the_full_one(p, q):
    kl, rest = divergence(p, q)
    assert kl == pytest.approx(full_kl(p, q), abs=1e-5)
    assert rest <= 1e-9


@given(distributions(12), distributions(12), st.integers(1, 11))
def test_kl_over_the_likeliest_is_never_above_the_full_one_nor_below_zero(p, q, k):
    kl, rest = divergence(likeliest(p, k), likeliest(q, k))
    assert 0 <= kl <= full_kl(p, q) + 1e-5
    assert rest == pytest.approx(1 - sum(map(exp, likeliest(p, k).values())))


@given(distributions(12), st.integers(1, 12))
def test_a_distribution_is_at_distance_zero_from_itself(p, k):
    assert divergence(likeliest(p, k), likeliest(p, k))[0] == pytest.approx(0, abs=1e-9)


def test_kl_of_two_coins_is_the_textbook_value():
    p, q = {0: log(0.5), 1: log(0.5)}, {0: log(0.9), 1: log(0.1)}
    assert divergence(p, q)[0] == pytest.approx(0.5108256, abs=1e-5)


def test_sides_that_list_no_token_in_common_are_far_apart():
    """B leaves 0.1 for the token that A gives 0.9: two coins of 0.9 and 0.1 are the least."""
    kl, rest = divergence({0: log(0.9)}, {1: log(0.9)})
    assert kl == pytest.approx(0.8 * log(9))
    assert rest == pytest.approx(0.1)


def test_tokens_that_are_impossible_add_nothing():
    impossible = {0: 0.0, 1: float("-inf")}
    assert divergence(impossible, impossible)[0] == pytest.approx(0, abs=1e-9)


def test_a_model_that_computes_nan_is_within_no_budget():
    broken = Position(0, float("nan"), {0: float("nan"), 1: float("nan")})
    for budget in (Budget(), Budget(max_kl=100.0), Budget(min_top1=0.0)):
        assert compare([position(0.6)], [broken]).over_budget(budget)
        assert compare([broken], [position(0.6)]).over_budget(budget)


def test_a_token_that_only_b_finds_impossible_is_infinitely_far():
    impossible = Position(0, float("-inf"), {0: float("-inf"), 1: 0.0})
    result = compare([position(0.6)], [impossible])
    assert result.kl == float("inf")
    assert result.over_budget(Budget(max_kl=1e9))


def position(probability: float) -> Position:
    likeliest = {0: log(probability), 1: log(1 - probability)}
    return Position(token=0, logprob=likeliest[0], likeliest=likeliest)


def test_agreement_and_differences_are_means_over_positions():
    result = compare(
        [position(0.6), position(0.7), position(0.8), position(0.9)],
        [position(0.6), position(0.4), position(0.8), position(0.9)],
    )
    assert result.num_positions == 4
    assert result.top1 == 0.75
    assert result.logprob_difference == pytest.approx((log(0.4) - log(0.7)) / 4)
    assert result.kl == pytest.approx(result.max_kl / 4)


def test_the_lowest_id_is_best_where_two_are_equal():
    assert Position(7, -1.0, {9: -0.7, 3: -0.7, 7: -1.0}).best == 3


@pytest.mark.parametrize(
    ("budget", "num_over"),
    [
        (Budget(), 0),
        (Budget(max_kl=1.0, min_top1=0.5), 0),
        (Budget(max_kl=1e-6), 1),
        (Budget(min_top1=0.9), 1),
        (Budget(max_kl=1e-6, min_top1=0.9), 2),
    ],
)
def test_every_broken_part_of_a_budget_is_named(budget, num_over):
    result = compare([position(0.6), position(0.7)], [position(0.6), position(0.4)])
    assert len(result.over_budget(budget)) == num_over


@pytest.mark.parametrize(
    ("num_only_a", "num_only_b", "is_over"), [(10, 0, True), (0, 10, False), (2, 1, False)]
)
def test_only_a_loss_that_is_no_chance_breaks_the_budget(num_only_a, num_only_b, is_over):
    a = [True] * num_only_a + [False] * num_only_b + [True, False]
    b = [False] * num_only_a + [True] * num_only_b + [True, False]
    answers = compare_answers(a, b)
    assert (answers.num_only_a, answers.num_only_b) == (num_only_a, num_only_b)
    assert (answers.num_correct_a, answers.num_correct_b) == (num_only_a + 1, num_only_b + 1)
    result = compare([position(0.6)], [position(0.6)], answers)
    assert bool(result.over_budget(Budget(min_p=0.05))) == is_over
    assert result.over_budget(Budget()) == []
