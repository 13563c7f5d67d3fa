"""Draft tokens on a rank: laid out to be verified, and accepted.

Verification samples a token at each position of a draft, with the random number that the position
has anyway. A draft token is accepted where it is the token sampled there, and the first one that is
not is replaced by it. For a draft that is a function of the tokens before it, this is rejection
sampling (Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding",
2023): a token is accepted with its probability p, and else the next one is drawn from the others,
p renormalised. The tokens are those of decoding one by one.

For measurements tokens may be accepted by lot instead, at a given rate, whatever the model says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from torch import Tensor

from vllm.config.speculative import SpeculativeConfig
from vllm.worker.drafts import DraftsInFlight, NewTokens, Ready
from vllm.worker.input_batch import InputBatch
from vllm.worker.input_buffers import to_device
from vllm.worker.numerics import BROKEN
from vllm.worker.sampler import uniforms

# Draws of lots differ from those of the tokens at the same places.
_LOTS = np.uint64(0x5851F42D4C957F2D)


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
    for the next step, of requests whose tokens are all known. drawn: by request, how many draft
    tokens are accepted by lot; None where the model says it. in_flight: has those of `drafts` that
    were LATER."""

    drafts: Mapping[str, list[int]]
    propose: Ready
    drawn: Mapping[str, int] | None = None
    in_flight: DraftsInFlight | None = None

    def accepted(self, request_ids: Sequence[str], sampled: Sequence[int]) -> list[list[int]]:
        """The new tokens of each request: its draft up to the first token that is refused, and what
        was sampled there. sampled: of each row of logits."""
        found, row, drafts = [], 0, self.drafts
        if self.in_flight is not None:
            drafts = self.in_flight.resolved(drafts)
        for request_id in request_ids:
            draft = drafts.get(request_id, [])
            tokens = sampled[row : row + len(draft) + 1]
            row += len(tokens)
            num_accepted = self._num_accepted(request_id, draft, tokens)
            found.append([*draft[:num_accepted], tokens[num_accepted]])
        assert row == len(sampled)
        return found

    def _num_accepted(self, request_id: str, draft: Sequence[int], tokens: Sequence[int]) -> int:
        if self.drawn is None:
            refused = (place for place, token in enumerate(draft) if tokens[place] != token)
            return next(refused, len(draft))
        count = self.drawn.get(request_id, 0)
        return next((place for place in range(count) if tokens[place] == BROKEN), count)


def draw_lots(
    batch: InputBatch, drafts: Mapping[str, Sequence[int]], config: SpeculativeConfig | None
) -> dict[str, int] | None:
    """How many tokens of each draft are accepted, as a function of the request's seed and of the
    places in its output; the mean is the config's rate times the tokens of the draft. None where
    the model decides. To be called before the step's new tokens are in the batch."""
    rate = config.acceptance_rate if config is not None else None
    if rate is None or not drafts:
        return None
    rows = np.array([batch.row_of[request_id] for request_id in drafts], np.int64)
    counts = np.array([len(draft) for draft in drafts.values()], np.int64)
    starts = np.cumsum(counts) - counts
    ahead = np.arange(counts.sum()) - np.repeat(starts, counts)
    places = np.repeat(batch.num_tokens[rows] - batch.num_prompt[rows], counts) + ahead
    chances = np.repeat([chance_of_each(rate, int(count)) for count in counts], counts)
    is_refused = uniforms(np.repeat(batch.seeds[rows] ^ _LOTS, counts), places) >= chances
    first = np.minimum.reduceat(np.where(is_refused, ahead, ahead.max() + 1), starts)
    return dict(zip(drafts, np.minimum(first, counts).tolist()))


def new_tokens(
    batch: InputBatch,
    sampled: SampledRows,
    tokens: Tensor,
    input_ids: Tensor | None,
    drawn: Mapping[str, int] | None = None,
) -> NewTokens:
    """What of `tokens` int64 [S], sampled for these rows, is accepted, without waiting for it; as
    `Verification.accepted`, but of a request that fails. input_ids: as of StepTokens."""
    firsts = np.flatnonzero(sampled.ahead == 0)
    rows = sampled.rows[firsts]
    num_drafts = batch.num_drafts[rows]
    if not num_drafts.any():
        return NewTokens(rows, num_drafts, None, tokens)
    if drawn is not None:
        ids = [batch.requests[row].request_id for row in rows]
        counts = np.array([drawn.get(request_id, 0) for request_id in ids], np.int64)
        num_accepted = to_device(counts, tokens.device)
    else:
        assert input_ids is not None
        ahead = np.arange(num_drafts.max())
        is_draft = ahead < num_drafts[:, None]
        own, given = firsts[:, None] + ahead, sampled.tokens[firsts][:, None] + 1 + ahead
        sent = to_device(np.where(is_draft, np.stack([own, given]), -1), tokens.device)
        own, given = sent.clamp(min=0)
        num_accepted = ((tokens[own] == input_ids[given]) & (sent[0] >= 0)).cumprod(1).sum(1)
    last = tokens[to_device(firsts, tokens.device) + num_accepted]
    return NewTokens(rows, num_drafts, num_accepted, last)


@cache
def chance_of_each(rate: float, num_tokens: int) -> float:
    """The chance p of each draft token, after those before it were accepted, with which
    p + p**2 + ... + p**num_tokens, the mean number of accepted tokens, is rate * num_tokens."""
    low, high = 0.0, 1.0
    while low < (p := (low + high) / 2) < high:
        is_low = sum(p**power for power in range(1, num_tokens + 1)) < rate * num_tokens
        low, high = (p, high) if is_low else (low, p)
    return high if rate else 0.0
