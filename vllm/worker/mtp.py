"""Drafts of the checkpoint's own layer of multi-token prediction."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm.config.speculative import STEP_DRAFT_TOKENS
from vllm.model_executor.context import ForwardBatch
from vllm.model_executor.layers.attention import planners
from vllm.model_executor.models.decoder import MTP
from vllm.model_executor.models.eagle3 import Eagle3Head
from vllm.worker.cuda_graph import CudaGraphs, PromptShape
from vllm.worker.drafts import (
    LATER,
    DraftsInFlight,
    GreedyDrafter,
    LateTokens,
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
    has_graphs = True
    _graphs: CudaGraphs[PromptShape] | None = None
    _fill_graphs: CudaGraphs[PromptShape] | None = None  # of steps after which nothing is drafted
    # What the graphs read beside `inputs`: given hidden states, and after which tokens to draft.
    _hidden: Tensor
    _read_rows: Tensor

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
    def _copies(self) -> list[Tensor]:
        """Draft tokens on the host: of the last step and of the one before."""
        is_cuda, size = self.device.type == "cuda", (2, STEP_DRAFT_TOKENS)
        return [*torch.zeros(size, dtype=torch.int64, device="cpu", pin_memory=is_cuda)]

    def capture(self, shapes: Sequence[PromptShape], pool: Any) -> None:
        if shapes and not self._is_planned:
            self._reserve(shapes)
            pad = self.inputs.pad_prompts
            self._graphs = CudaGraphs(self._first_once, shapes, pool, pad)
            self._fill_graphs = CudaGraphs(self._fill_once, shapes, pool, pad)

    def _reserve(self, shapes: Sequence[PromptShape]) -> None:
        given = self.given(self.model(self.inputs.padding(1)))
        self._hidden = given.new_zeros(max(shape.tokens for shape in shapes), given.shape[1])
        most_rows = max(shape.seqs for shape in shapes)
        self._read_rows = torch.zeros(most_rows, dtype=torch.int64, device=self.device)

    def drop_graphs(self) -> None:
        self._graphs = self._fill_graphs = None

    def _first_once(self, shape: PromptShape) -> Tensor:
        filled = self.inputs.prompt_batch(shape)
        filled.read_rows = self._read_rows[: shape.seqs]
        return self.forward(filled, self._hidden[: shape.tokens])

    def _fill_once(self, shape: PromptShape) -> Tensor:
        hidden = self._hidden[: shape.tokens]
        self._fill_cache(self.inputs.prompt_batch(shape), hidden)
        return hidden

    def _first(self, filled: ForwardBatch, hidden: Tensor, shape: PromptShape | None) -> Tensor:
        """`forward` of a step, in a CUDA graph where it has a shape."""
        if shape is None or self._graphs is None:
            return self.forward(filled, hidden)
        assert filled.read_rows is not None
        num_rows = len(filled.read_rows)
        self._hidden[: len(hidden)] = hidden
        self._read_rows[:num_rows] = filled.read_rows
        self._read_rows[num_rows : shape.seqs] = 0  # of padding: any token of the step
        return self._graphs.replay(shape)[:num_rows]

    def _fill(self, filled: ForwardBatch, hidden: Tensor, shape: PromptShape | None) -> None:
        if shape is None or self._fill_graphs is None:
            self._fill_cache(filled, hidden)
            return
        self._hidden[: len(hidden)] = hidden
        self._fill_graphs.replay(shape)

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
        shape = self._shape_of(own)
        with self.with_scratch(rows, first + limits):
            filled = self.inputs.fill(self.rows, own.rows, own.counts, own.starts, shape=shape)
            if own.late is not None:
                own.late.put_into(filled.input_ids, self.ahead)
            hidden = self.given(own.hidden)
            places = _put_last(filled.input_ids, at[new.rows], new)
            if not len(rows):
                self._fill(filled, hidden, shape)
                return no_proposals
            which = to_device(order, device)
            filled.read_rows, exact = places[which], None
            if num_accepted is not None:
                exact = to_device(num_tokens - 1, device)[which] + num_accepted[which]
            given = self._first(filled, hidden, shape)
            tokens = torch.cat(self.draft(chosen, given, first, exact))
        return self._send(tokens, rows, limits)

    def _send(self, tokens: Tensor, rows: np.ndarray, limits: np.ndarray) -> Ready:
        """Copies drafts to the host, which needs them for requests that read their own tokens."""
        self._copies.reverse()
        on_host, copied = self._copies[0][: len(tokens)], None
        on_host.copy_(tokens, non_blocking=True)
        if self.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()
        requests = [self.batch.requests[row] for row in rows]
        ids = [request.request_id for request in requests]
        is_late = not any(request.reads_own_tokens for request in requests)
        places = self.by_request(ids, range(len(tokens)), limits)
        self.in_flight = found = DraftsInFlight(tokens, on_host, copied, places, self.timeout_s)

        def ready(request_ids: Sequence[str]) -> Proposals:
            known = [LATER] * len(on_host) if is_late else found.known()
            drafts, wanted = self.by_request(ids, known, limits), set(request_ids)
            return Proposals({i: draft for i, draft in drafts.items() if i in wanted})

        return ready

    def _shape_of(self, step: StepTokens) -> PromptShape | None:
        """The graph to compute it with; None for none."""
        if self._graphs is None:
            return None
        sizes = int(step.counts.sum()), int(step.counts.max()), len(step.rows)
        return self._graphs.fitting(lambda one: one.holds(*sizes))

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
    late = None if step.late is None else _of(step.late, places)
    return StepTokens(step.rows[kept], counts[kept], step.starts[kept], hidden, late=late)


def _of(late: LateTokens, tokens: np.ndarray) -> LateTokens | None:
    """Those that follow the given tokens of the step, and are among what follows these."""
    before = late.places - 1
    at = np.minimum(np.searchsorted(tokens, before), len(tokens) - 1)
    is_there = tokens[at] == before if len(tokens) else np.zeros(len(before), np.bool_)
    if not is_there.any():
        return None
    which = to_device(np.flatnonzero(is_there), late.tokens.device)
    places = at[is_there] + 1
    return LateTokens(late.tokens[which], places, to_device(places, late.tokens.device))
