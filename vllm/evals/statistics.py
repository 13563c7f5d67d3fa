"""Statistics of right and wrong answers, exact where that is possible."""

from math import comb, sqrt

_Z95 = 1.959963984540054  # two-sided 95 % point of the normal distribution


def wilson_interval(num_right: int, num_all: int) -> tuple[float, float]:
    """95 % confidence interval of a rate; (0, 1) of nothing.

    Wilson, "Probable inference, the law of succession, and statistical inference" (1927). Unlike
    rate +- 2 sigma it is right near 0 and 1, where small models score.
    """
    assert 0 <= num_right <= num_all
    if num_all == 0:
        return 0.0, 1.0
    rate, z2 = num_right / num_all, _Z95 * _Z95
    centre = (rate + z2 / (2 * num_all)) / (1 + z2 / num_all)
    spread = rate * (1 - rate) / num_all + z2 / (4 * num_all * num_all)
    half = _Z95 * sqrt(spread) / (1 + z2 / num_all)
    low = 0.0 if num_right == 0 else centre - half
    return low, 1.0 if num_right == num_all else centre + half


def mcnemar_p(num_only_a: int, num_only_b: int) -> float:
    """Two-sided exact p-value that A and B are right equally often, on the same questions.

    num_only_a, num_only_b: questions that one alone got right. Those on which both agree say
    nothing. Under the hypothesis the split is binomial(n, 1/2); McNemar (1947), exact form.
    """
    assert num_only_a >= 0 and num_only_b >= 0
    num_all = num_only_a + num_only_b
    tail = sum(comb(num_all, i) for i in range(min(num_only_a, num_only_b) + 1))
    # Integers until the division: 2 ** num_all overflows a float from 1,024 questions on.
    return min(1.0, (2 * tail) / (1 << num_all))
