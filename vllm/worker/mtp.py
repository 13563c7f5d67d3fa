"""Drafts of the checkpoint's own layer of multi-token prediction."""

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from vllm.config.speculative import STEP_DRAFT_TOKENS
from vllm.model_executor.context import ForwardBatch
from vllm.model_executor.layers.attention import planners
from vllm.model_executor.models.decoder import MTP
from vllm.model_executor.models.eagle3 import Eagle3Head
from vllm.worker.drafts import (
    GreedyDrafter,
    NewTokens,
    Proposals,
    Ready,
    StepTokens,
    no_proposals,
)
from vllm.worker.input_buffers import to_device


class MTPDrafter(GreedyDrafter):
    """At position i of its cache it reads what the model gave there and the token at i + 1.

    What the model gave is not kept, so the layer's keys and values are computed in every step, and
    the rest of it where tokens are drafted. Those of the last token of a block that a request finds
    in the prefix cache were made with the next token of another request, which may differ: its
    drafts then are likely a little worse, and what is sampled is the same.
    """

    reads_hidden = True
    ahead = 1

    @property
    def layer(self) -> MTP | Eagle3Head:
        """What drafts."""
        assert self.model.mtp is not None
        return self.model.mtp

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.model.model.embed(input_ids)

    def given(self, hidden: Tensor | None) -> Tensor:
        """What the layer reads of what the model gave."""
        assert hidden is not None
        return hidden

    def forward(self, filled: ForwardBatch, hidden: Tensor) -> Tensor:
        drafted: Tensor = self.layer(self.embed(filled.input_ids), hidden, filled)
        return drafted

    @cached_property
    def _is_planned(self) -> bool:
        """Whether its attention needs positions on the host."""
        return bool(planners(self.layer))

    @cached_property
    def _on_host(self) -> Tensor:
        is_cuda = self.device.type == "cuda"
        return torch.zeros(STEP_DRAFT_TOKENS, dtype=torch.int64, device="cpu", pin_memory=is_cuda)

    def follow(self, step: StepTokens, new: Callable[[], NewTokens], most: int) -> Ready:
        own = self._with_next_tokens(step)
        if not len(own.rows):
            return no_proposals
        return self._draft_after(own, new(), most)

    def _draft_after(self, own: StepTokens, new: NewTokens, most: int) -> Ready:
        batch, device = self.batch, self.device
        at = np.full(len(batch.requests), -1)
        reaches_end = own.starts + own.counts == batch.num_computed[own.rows]
        at[own.rows[reaches_end]] = (np.cumsum(own.counts) - 1)[reaches_end]
        is_there = at[new.rows] >= 0
        if not is_there.all():  # a request that is full ends with its new token
            new = new.only(is_there)
        num_tokens, num_accepted = batch.num_tokens[new.rows], new.num_accepted
        chosen = self.chosen(new.rows, num_tokens + 1, most)
        order, rows, limits = chosen
        first = num_tokens - 1 + new.num_drafts  # at most
        if num_accepted is not None and self._is_planned:
            first = num_tokens - 1 + num_accepted.cpu().numpy()
        first = first[order]
        with self.with_scratch(rows, first + limits):
            filled = self.inputs.fill(self.rows, own.rows, own.counts, own.starts)
            hidden = self.given(own.hidden)
            places = _put_last(filled.input_ids, at[new.rows], new)
            if not len(rows):
                self._fill_cache(filled, hidden)
                return no_proposals
            which = to_device(order, device)
            filled.read_rows, exact = places[which], None
            if num_accepted is not None:
                exact = to_device(num_tokens - 1, device)[which] + num_accepted[which]
            tokens = torch.cat(self.draft(chosen, self.forward(filled, hidden), first, exact))
        on_host = self._on_host[: len(tokens)]
        on_host.copy_(tokens, non_blocking=True)
        ids = [batch.requests[row].request_id for row in rows]

        def ready(request_ids: Sequence[str]) -> Proposals:
            drafts, wanted = self.by_request(ids, on_host.tolist(), limits), set(request_ids)
            return Proposals({i: draft for i, draft in drafts.items() if i in wanted})

        return ready

    def _with_next_tokens(self, step: StepTokens) -> StepTokens:
        """The tokens of a step that another follows, or will once it has sampled."""
        batch, ends = self.batch, np.full(len(step.rows), self._width)
        is_pooled = batch.wants_pooling[step.rows]
        ends[is_pooled] = batch.num_tokens[step.rows[is_pooled]] - 1
        return _until(step, ends)

    def _fill_cache(self, filled: ForwardBatch, hidden: Tensor) -> None:
        self.layer.fill_cache(self.embed(filled.input_ids), hidden, filled)


def _put_last(input_ids: Tensor, ends: np.ndarray, new: NewTokens) -> Tensor:
    """Fills in the last new token of each request where the last accepted token stands, int64 [R],
    which is returned; at first at `ends`, where the last draft token does: what is computed for
    refused ones is overwritten by later steps, and must be tokens."""
    places = to_device(ends, input_ids.device)
    input_ids.index_copy_(0, places, new.last)
    if new.num_accepted is not None:
        places = places - to_device(new.num_drafts, input_ids.device) + new.num_accepted
        input_ids.index_copy_(0, places, new.last)
    return places


def _until(step: StepTokens, ends: np.ndarray) -> StepTokens:
    """The tokens of a step at positions before `ends`, of each of its rows."""
    counts = np.clip(ends - step.starts, 0, step.counts)
    if (counts == step.counts).all():
        return step
    first = np.cumsum(step.counts) - step.counts
    places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - first, counts)
    assert step.hidden is not None
    kept = counts > 0
    hidden = step.hidden[to_device(places, step.hidden.device)]
    return StepTokens(step.rows[kept], counts[kept], step.starts[kept], hidden)
