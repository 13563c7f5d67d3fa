"""Drafts of the checkpoint's own layer of multi-token prediction."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from vllm.model_executor.context import ForwardBatch
from vllm.model_executor.models.decoder import MTP
from vllm.model_executor.models.eagle3 import Eagle3Head
from vllm.worker.drafts import GreedyDrafter, Proposals, StepTokens
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

    def propose(self, request_ids: Sequence[str], most: int, step: StepTokens) -> Proposals:
        batch = self.batch
        last = np.maximum(batch.num_tokens[step.rows] - 1, 0)
        last -= batch.token_ids[step.rows, last] < 0  # of a request that fails
        own = _until(step, last)
        rows, limits = self.chosen(request_ids, most)
        if not len(own.rows):
            return Proposals({})
        at = np.zeros(len(batch.requests), np.int64)
        at[own.rows] = np.cumsum(own.counts) - 1
        with self.with_scratch(rows, limits):
            filled = self.inputs.fill(self.rows, own.rows, own.counts, own.starts)
            hidden = self.given(own.hidden)
            if not len(rows):
                self._fill_cache(filled, hidden)
                return Proposals({})
            filled.read_rows = to_device(at[rows], hidden.device)
            return Proposals(self.draft(rows, limits, self.forward(filled, hidden)))

    def follow(self, step: StepTokens, rows: np.ndarray, tokens: Tensor) -> None:
        ends, width = step.starts + step.counts, self.rows.token_ids.shape[1]
        own = _until(step, np.full(len(ends), width))
        if not len(own.rows):
            return
        filled = self.inputs.fill(self.rows, own.rows, own.counts, own.starts)
        at = np.full(len(self.batch.requests), -1)
        at[own.rows] = np.cumsum(own.counts) - 1
        at[step.rows[ends > width]] = -1  # a full row ends with its new token
        places = at[rows]
        if (places < 0).any():
            tokens = tokens[to_device(np.flatnonzero(places >= 0), tokens.device)]
            places = places[places >= 0]
        filled.input_ids.index_copy_(0, to_device(places, tokens.device), tokens)
        self._fill_cache(filled, self.given(own.hidden))

    def _fill_cache(self, filled: ForwardBatch, hidden: Tensor) -> None:
        self.layer.fill_cache(self.embed(filled.input_ids), hidden, filled)


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
