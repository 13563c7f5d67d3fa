"""Recurrent states after each draft token, by kernels that keep one state for each request.

First the tokens before the drafts are computed, as in a step without drafts; then the first draft
token of every request, as a step of one token each, then the second ones, and so on. So each token
has the bits that it has when tokens are decoded one by one.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn.functional import pad

Requests = tuple[Tensor, Tensor, Tensor]
"""state_slots, query_start_loc and seq_lens of `AttentionBatch`."""


class _Pass(NamedTuple):
    """tokens: int64 [n], which of the step are computed. before: int64, slots of the states that
    their requests go on from; None for those of the requests."""

    tokens: Tensor
    requests: Requests
    before: Tensor | None


def has_drafts(draft_slots: Tensor | None) -> TypeGuard[Tensor]:
    """draft_slots: of `AttentionBatch`. Waits for the device."""
    return draft_slots is not None and bool((draft_slots >= 0).any())


def keep_draft_states(
    kernel: Callable[..., Tensor],
    tokens: Sequence[Tensor],
    weights: Sequence[Tensor],
    state: Tensor,
    requests: Requests,
    draft_slots: Tensor,
    out: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """What `kernel(*tokens, *weights, state, *requests, **options)` gives, which reads and writes
    `state` [slots, ...] in the slots of the requests; and the state after each draft token goes to
    its slot of draft_slots [T], as in `AttentionBatch`. tokens: what has a row for each."""
    for one in _passes(*requests, draft_slots):
        if one.before is not None:
            state[one.requests[0].long()] = state[one.before]
        given = [x[one.tokens] for x in tokens]
        own = kernel(*given, *weights, state, *one.requests, **options)
        if out is None:
            out = own.new_empty(draft_slots.shape[0], *own.shape[1:])
        out[one.tokens] = own
    assert out is not None
    return out


def _passes(
    state_slots: Tensor, query_start_loc: Tensor, seq_lens: Tensor, draft_slots: Tensor
) -> Iterator[_Pass]:
    is_draft = draft_slots >= 0
    drafts_before = pad(is_draft.cumsum(0), (1, 0))[query_start_loc.long()]
    num_drafts = drafts_before.diff()
    known = state_slots, (query_start_loc - drafts_before).int(), (seq_lens - num_drafts).int()
    yield _Pass((~is_draft).nonzero()[:, 0], known, None)
    before, first = state_slots.long(), query_start_loc[1:] - num_drafts
    for place in range(int(num_drafts.max())):
        drafting = (num_drafts > place).nonzero()[:, 0]
        tokens = first[drafting] + place
        slots = draft_slots[tokens]
        one_each = torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device)
        lens = torch.full_like(slots, 2)  # more than this token: they have a state
        yield _Pass(tokens, (slots, one_each, lens), before[drafting])
        before[drafting] = slots.long()
