"""Two configurations on the same tokens: how far apart they are, and whether that is too far.

Pure functions of values. Estimators, over the positions of all prompts:
  KL      mean of KL(A || B) over a partition of the vocabulary: every token among the likeliest
          of both, one bucket for those among A's alone, one for all others. Joining tokens never
          raises KL, so this is a lower bound of the full one, and close to it where the tokens
          that both list hold most of the mass.
  top-1   share of positions where both think the same token likeliest.
  logprob mean of (B - A) of the log-probability of the token that the text has; in nats.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, fsum, isnan, log

from vllm.evals.statistics import mcnemar_p, wilson_interval

# A bucket's mass is 1 minus a sum of float32 probabilities: below this it is rounding.
_MIN_REST = 1e-6


@dataclass(frozen=True)
class Position:
    """What a model thinks of one place in a text. logprob: of the token that stands there;
    likeliest: token id -> natural log-probability."""

    token: int
    logprob: float
    likeliest: Mapping[int, float]

    @property
    def best(self) -> int:
        """The likeliest token; the lowest id where two are equal."""
        return min(self.likeliest, key=lambda token: (-self.likeliest[token], token))


@dataclass(frozen=True)
class Budget:
    """Most that B may differ from A; None does not judge.

    min_p: with answers, B fails when it is right less often and McNemar's p is below this.
    """

    max_kl: float | None = None
    min_top1: float | None = None
    min_p: float | None = None


@dataclass(frozen=True)
class Answers:
    """Both sides' answers to the same questions; p: McNemar's, two-sided, exact."""

    num_questions: int
    num_correct_a: int
    num_correct_b: int
    num_only_a: int
    num_only_b: int
    p: float


@dataclass(frozen=True)
class Comparison:
    """B against A. mean_rest: mean mass of A on tokens that it does not list."""

    num_positions: int
    kl: float
    max_kl: float
    top1: float
    top1_interval: tuple[float, float]
    logprob_difference: float
    mean_rest: float
    answers: Answers | None = None

    def over_budget(self, budget: Budget) -> list[str]:
        """What is over the budget, a sentence each; nothing means it is kept."""
        if isnan(self.kl):
            return ["a side computes log-probabilities that are not numbers"]
        found = []
        if budget.max_kl is not None and not self.kl <= budget.max_kl:
            found.append(f"KL {self.kl:.5f} is above {budget.max_kl:g}")
        if budget.min_top1 is not None and not self.top1 >= budget.min_top1:
            found.append(f"top-1 agreement {self.top1:.4f} is below {budget.min_top1:g}")
        a = self.answers
        if a is not None and a.num_only_b < a.num_only_a and a.p < (budget.min_p or 0):
            found.append(
                f"B answers {a.num_correct_b} of {a.num_questions} correctly and A "
                f"{a.num_correct_a}: McNemar's p {a.p:.2g} is below {budget.min_p:g}"
            )
        return found


def compare(
    a: Sequence[Position], b: Sequence[Position], answers: Answers | None = None
) -> Comparison:
    """Both sides' positions of the same text, in the same order."""
    assert a and len(a) == len(b)
    assert all(x.token == y.token for x, y in zip(a, b))
    pairs = list(zip(a, b))
    divergences = [divergence(x.likeliest, y.likeliest) for x, y in pairs]
    num_equal = sum(x.best == y.best for x, y in pairs)
    return Comparison(
        num_positions=len(pairs),
        kl=fsum(kl for kl, _ in divergences) / len(pairs),
        max_kl=max(kl for kl, _ in divergences),
        top1=num_equal / len(pairs),
        top1_interval=wilson_interval(num_equal, len(pairs)),
        logprob_difference=fsum(y.logprob - x.logprob for x, y in pairs) / len(pairs),
        mean_rest=fsum(rest for _, rest in divergences) / len(pairs),
        answers=answers,
    )


def divergence(p: Mapping[int, float], q: Mapping[int, float]) -> tuple[float, float]:
    """KL(p || q) in nats over the partition of this file's head; p's mass in its last bucket.

    p, q: token id -> natural log-probability, of some tokens each.
    """
    shared = sorted(p.keys() & q.keys())
    own_p = fsum(exp(p[token]) for token in p.keys() - q.keys())
    left_p, left_q = (1 - fsum(exp(side[token]) for token in shared) for side in (p, q))
    rest_p = left_p - own_p
    # What q gives to p's own tokens is unknown, but is none of what it gives to those it lists.
    # Of all that is possible, the share that makes KL least is taken.
    unlisted_q = 1 - fsum(map(exp, q.values()))
    own_q = min(unlisted_q, left_q * own_p / left_p) if own_p > 0 and left_p > 0 else 0.0
    terms = [_term(exp(p[token]), p[token], q[token]) for token in shared]
    for mass_p, mass_q in ((own_p, own_q), (rest_p, left_q - own_q)):
        if mass_p > 0:
            terms.append(_term(mass_p, log(max(mass_p, _MIN_REST)), log(max(mass_q, _MIN_REST))))
    kl = fsum(terms)
    # Not max(0.0, kl): that is 0 for nan.
    return 0.0 if kl < 0 else kl, max(0.0, rest_p)


def _term(mass: float, log_p: float, log_q: float) -> float:
    """A token that both find impossible adds nothing, where -inf - -inf would be nan."""
    return 0.0 if mass == 0 else mass * (log_p - log_q)


def compare_answers(a: Sequence[bool], b: Sequence[bool]) -> Answers:
    """a, b: which of the same questions each side got right."""
    assert len(a) == len(b)
    only_a = sum(x and not y for x, y in zip(a, b))
    only_b = sum(y and not x for x, y in zip(a, b))
    return Answers(len(a), sum(a), sum(b), only_a, only_b, mcnemar_p(only_a, only_b))
