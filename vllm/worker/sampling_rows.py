"""Sampling parameters of the rows of logits of one step, from the rows of the input batch."""

import numpy as np
from torch import Tensor

from vllm.core.request import Request
from vllm.worker.input_batch import InputBatch
from vllm.worker.sampler import RowEdits, SamplingBatch
from vllm.worker.speculation import SampledRows
from vllm.worker.token_limits import banned_next, both


def sampling_batch(
    batch: InputBatch, sampled: SampledRows, bitmasks: dict[str, Tensor]
) -> SamplingBatch:
    """bitmasks: by request, int32 [draft tokens + 1, words], what its grammar allows at each."""
    rows = sampled.rows

    def request_of(index: int) -> Request:
        return batch.requests[int(rows[index])]

    edits = (
        _edits(batch, index, rows[index], request_of(index), sampled.ahead[index])
        for index in np.flatnonzero(batch.may_edit_logits[rows]).tolist()
    )
    num_logprobs = {
        index: request_of(index).sampling.logprobs or 0
        for index in np.flatnonzero(batch.wants_logprobs[rows]).tolist()
    }
    named = {
        index: ids
        for index in num_logprobs
        if (ids := request_of(index).sampling.logprob_token_ids)
    }
    masks: dict[int, Tensor] = {}
    for index in range(len(rows) if bitmasks else 0):
        if (found := bitmasks.get(request_of(index).request_id)) is not None:
            masks[index] = found[sampled.ahead[index]]
    for index in np.flatnonzero(batch.limits_tokens[rows]).tolist():
        masks[index] = both(masks.get(index), batch.token_masks[request_of(index).request_id])
    return SamplingBatch(
        temperature=batch.temperature[rows],
        top_k=batch.top_k[rows],
        top_p=batch.top_p[rows],
        min_p=batch.min_p[rows],
        seeds=batch.seeds[rows],
        indices=batch.num_tokens[rows] - batch.num_prompt[rows] + sampled.ahead,
        edits=[edit for edit in edits if edit is not None],
        num_logprobs=num_logprobs,
        bitmasks=masks,
        named=named,
    )


def _edits(
    batch: InputBatch, index: int, row: int, request: Request, num_ahead: int
) -> RowEdits | None:
    """Of row `index` of the logits; num_ahead: draft tokens that count as output there."""
    s = request.sampling
    num_prompt, num_tokens = batch.num_prompt[row], batch.num_tokens[row] + num_ahead
    holds_back = num_tokens - num_prompt < s.min_tokens
    if not (s.penalises or s.logit_bias or holds_back or request.bad_words):
        return None
    tokens = batch.token_ids[row]
    banned = tuple(request.stop_token_ids) if holds_back else ()
    if request.bad_words:
        banned += (*banned_next(request.bad_words, tokens[num_prompt:num_tokens]),)
    return RowEdits(
        row=index,
        logit_bias=s.logit_bias,
        banned=banned,
        repetition_penalty=s.repetition_penalty,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        history=tokens[:num_tokens],
        output=tokens[num_prompt:num_tokens],
    )
