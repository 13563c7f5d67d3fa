"""Draft tokens on a rank: laid out to be verified, and accepted.

Verification samples a token at each position of a draft, with the random number that the position
has anyway. A draft token is accepted where it is the token sampled there, and the first one that is
not is replaced by it. For a draft that is a function of the tokens before it, this is rejection
sampling (Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding",
2023): a token is accepted with its probability p, and else the next one is drawn from the others,
p renormalised. The tokens are those of decoding one by one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vllm.worker.drafts import Proposals


class SampledRows(NamedTuple):
    """Rows of logits of a step. tokens: int64 [S], which token of the step each is of. rows: int64
    [S], its row of the batch. ahead: int64 [S], draft tokens of its request up to it."""

    tokens: np.ndarray
    rows: np.ndarray
    ahead: np.ndarray

    @classmethod
    def of(cls, last: np.ndarray, rows: np.ndarray, num_drafts: np.ndarray) -> "SampledRows":
        """last: the last token of each request in the step; rows, num_drafts: of the requests."""
        if not num_drafts.any():
            return cls(last, rows, np.zeros_like(rows))
        counts = num_drafts + 1
        ahead = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return cls(np.repeat(last - num_drafts, counts) + ahead, np.repeat(rows, counts), ahead)

    def only(self, is_kept: np.ndarray) -> "SampledRows":
        return SampledRows(*(values[is_kept] for values in self))


@dataclass(frozen=True, slots=True)
class Verification:
    """What a step verifies and drafts. drafts: draft tokens in the step, by request. propose: those
    for the next step, of requests whose tokens are all known."""

    drafts: Mapping[str, Sequence[int]]
    propose: Callable[[Sequence[str]], Proposals]

    @property
    def has_drafts(self) -> bool:
        return bool(self.drafts)

    def accepted(self, request_ids: Sequence[str], sampled: Sequence[int]) -> list[list[int]]:
        """The new tokens of each request, up to the first that is not its draft's. sampled: of each
        row of logits."""
        found, row = [], 0
        for request_id in request_ids:
            draft = self.drafts.get(request_id, ())
            tokens = sampled[row : row + len(draft) + 1]
            row += len(tokens)
            differing = (place for place, token in enumerate(draft) if tokens[place] != token)
            found.append([*tokens[: next(differing, len(draft)) + 1]])
        assert row == len(sampled)
        return found
