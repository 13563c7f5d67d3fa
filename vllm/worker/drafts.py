"""What proposes draft tokens after a step, and what those of models have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.config.speculative import STEP_DRAFT_TOKENS
from vllm.core.outputs import SchedulerOutput
from vllm.core.request import Request
from vllm.distributed.groups import wait_for
from vllm.model_executor.context import ForwardBatch
from vllm.model_executor.models.decoder import CausalLM
from vllm.ops.paged_attention import AttentionBatch, HostBatch
from vllm.worker.block_table import BlockTable
from vllm.worker.cuda_graph import PromptShape
from vllm.worker.input_batch import InputBatch
from vllm.worker.input_buffers import to_device
from vllm.worker.step_inputs import StepInputs


class LateTokens(NamedTuple):
    """Draft tokens of a step that the host does not know when it lays it out, int64 [n] on the
    device. places: where they are among the tokens of the step, int64 [n]; on_device: the same."""

    tokens: Tensor
    places: np.ndarray
    on_device: Tensor

    def put_into(self, input_ids: Tensor, ahead: int = 0) -> None:
        """ahead: how many tokens these inputs are ahead of the step's."""
        input_ids.index_copy_(0, self.on_device - ahead if ahead else self.on_device, self.tokens)


class StepTokens(NamedTuple):
    """What a step computed: int64 `counts` of tokens of each of `rows`, from positions `starts` on.
    hidden: of all of them, what the model gave (`CausalLM.forward`); None where it is not read.
    input_ids: int64, all of them, valid until the next step is laid out; None where no request has
    more than one. late: of its draft tokens.
    """

    rows: np.ndarray
    counts: np.ndarray
    starts: np.ndarray
    hidden: Tensor | None = None
    input_ids: Tensor | None = None
    late: LateTokens | None = None


class NewTokens(NamedTuple):
    """What a step sampled for `rows` of the batch, of which it verified `num_drafts` draft tokens,
    both int64 [R]. num_accepted: int64 [R] of these, None where there are no drafts. last: int64
    [R], the token after them. Both may be on the device alone."""

    rows: np.ndarray
    num_drafts: np.ndarray
    num_accepted: Tensor | None
    last: Tensor

    def only(self, is_kept: np.ndarray) -> "NewTokens":
        kept = to_device(np.flatnonzero(is_kept), self.last.device)
        accepted = None if self.num_accepted is None else self.num_accepted[kept]
        return NewTokens(self.rows[is_kept], self.num_drafts[is_kept], accepted, self.last[kept])


LATER = -1
"""Stands for a draft token that the device alone knows."""


@dataclass(frozen=True, slots=True)
class DraftsInFlight:
    """Draft tokens that are computed or will be: int64 [n] `tokens` on the device, which `on_host`
    holds after `copied`, None: at once. places: by request, of its own in their order. timeout_s:
    the longest wait for them."""

    tokens: Tensor
    on_host: Tensor
    copied: torch.cuda.Event | None
    places: Mapping[str, Sequence[int]]
    timeout_s: float | None = None

    def known(self) -> list[int]:
        """Waits for them."""
        if self.copied is not None:
            wait_for(self.copied, self.timeout_s)
        found: list[int] = self.on_host.tolist()
        return found

    def late(
        self, drafts: Mapping[str, Sequence[int]], last: Mapping[str, int]
    ) -> LateTokens | None:
        """Of a step that verifies these drafts. last: by request, its last token of the step."""
        late = {i: len(draft) for i, draft in drafts.items() if draft[0] == LATER}
        if not late:
            return None
        own = [place for i, count in late.items() for place in self.places[i][:count]]
        places = [last[i] - count + 1 + n for i, count in late.items() for n in range(count)]
        sent = to_device(np.array([own, places]), self.tokens.device)
        return LateTokens(self.tokens[sent[0]], np.array(places), sent[1])

    def resolved(self, drafts: Mapping[str, list[int]]) -> dict[str, list[int]]:
        """The same drafts, all known. Waits for those that were not."""
        late = [i for i, draft in drafts.items() if draft[0] == LATER]
        tokens = self.known() if late else []
        found = {i: [tokens[n] for n in self.places[i][: len(drafts[i])]] for i in late}
        return {**drafts, **found}


class Proposals(NamedTuple):
    """drafts: by request; LATER for tokens that are in flight. catch_up_seconds: of the time for
    them, what tokens took that the drafter had not seen after the steps before, as of a prompt."""

    drafts: dict[str, list[int]]
    catch_up_seconds: float = 0.0


Ready = Callable[[Sequence[str]], Proposals]
"""Drafts of these requests, once the tokens before them are in the batch."""


def no_proposals(request_ids: Sequence[str]) -> Proposals:
    return Proposals({})


class Drafter:
    """Proposes nothing. reads_hidden: of all tokens of every step. in_flight: what it proposed
    last, where the next step may be laid out before the host knows it. timeout_s: the longest wait
    for the device; None without other ranks."""

    reads_hidden = False
    in_flight: DraftsInFlight | None = None
    timeout_s: float | None = None

    def follow(self, step: StepTokens, new: Callable[[], NewTokens], most: int) -> Ready:
        """After a step that may still run on the device: what gives up to `most` draft tokens for
        each request with new ones. A drafter that can launches all of that here."""
        return partial(self.propose, most=most)

    def propose(self, request_ids: Sequence[str], most: int) -> Proposals:
        """Up to `most` tokens for each of these requests, whose tokens are all known."""
        return Proposals({})

    def capture(self, shapes: Sequence[PromptShape], pool: Any) -> None:
        """CUDA graphs of what it computes after steps of these shapes. pool: as of CudaGraphs."""

    def drop_graphs(self) -> None:
        """It computes eagerly from now on."""

    def late_tokens(self, step: SchedulerOutput, last: np.ndarray) -> LateTokens | None:
        """Of a step. last: int64, the last token of each of its requests."""
        drafts = step.scheduled_spec_decode_tokens
        if not drafts or self.in_flight is None:
            return None
        return self.in_flight.late(drafts, dict(zip(step.num_scheduled_tokens, last.tolist())))

    def add(self, request: Request, num_computed: int) -> None:
        """A request of the batch, with its first blocks."""

    def take(self, blocks: Sequence[int]) -> None:
        """Further blocks of a request."""

    def drop(self, request_id: str) -> None:
        """A request that leaves the batch."""


@dataclass
class _Rows:
    """As step_inputs.Rows."""

    token_ids: np.ndarray
    tables: list[BlockTable]
    sampled_at: np.ndarray
    state_slots: np.ndarray


class Chosen(NamedTuple):
    """Who drafts, and how many tokens each, most first; int64 [n]. order: which of those asked for
    they are."""

    order: np.ndarray
    rows: np.ndarray
    limits: np.ndarray

    def only(self, is_kept: np.ndarray) -> "Chosen":
        return Chosen(*(values[is_kept] for values in self))


class GreedyDrafter(Drafter, ABC):
    """Drafts one token after another, each the likeliest one, for all requests at once.

    Its KV cache has the blocks of the model's, and the same block tables: what a refused draft left
    at a position is overwritten. A draft needs blocks before the scheduler gives the request any:
    those are scratch, and what is in them is computed again.

    ahead: how many tokens what it reads is ahead of its position in the cache. has_graphs: where
    the engine captures steps.
    """

    ahead = 0
    has_graphs = False

    def __init__(
        self,
        model: CausalLM,
        batch: InputBatch,
        config: VllmConfig,
        num_blocks: int,
        max_len: int,
        device: torch.device,
    ):
        """num_blocks: of requests. max_len: of a request, in tokens."""
        self.model, self.batch, self._max_len, self.device = model, batch, max_len, device
        scheduler = config.scheduler_config
        self._scratch = np.arange(num_blocks, num_blocks + config.num_draft_blocks)
        pages, most = (batch.max_blocks, batch.block_size), scheduler.max_num_seqs
        num_tokens = scheduler.max_num_batched_tokens
        self.inputs = StepInputs(
            num_tokens, most, *pages, device,
            verifies_drafts=self.has_graphs, for_graphs=self.has_graphs,
        )  # fmt: skip
        # Of one token for each request: filling in waits for what was filled in before.
        self._next_inputs = StepInputs(most, most, *pages, device, for_graphs=False)
        self.rows = _Rows(
            batch.token_ids[:, self.ahead :],
            batch.tables,
            np.full_like(batch.sampled_at, -1),
            batch.state_slots,
        )

    @abstractmethod
    def forward(self, filled: ForwardBatch, hidden: Tensor) -> Tensor:
        """[S, hidden size] that `likeliest` takes. hidden: what it gave for the tokens before,
        or the model."""

    def chosen(self, rows: np.ndarray, num_tokens: np.ndarray, most: int) -> Chosen:
        """Of `rows` with so many tokens."""
        rows, num_tokens = rows[:STEP_DRAFT_TOKENS], num_tokens[:STEP_DRAFT_TOKENS]
        limits = self._left(rows, num_tokens)
        limits = np.minimum(limits, min(most, STEP_DRAFT_TOKENS // max(1, len(rows))))
        order = np.argsort(-limits, kind="stable")
        order = order[limits[order] > 0]
        return Chosen(order, rows[order], limits[order])

    def _left(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Draft tokens that are of use after so many tokens, by the ends of the requests."""
        batch = self.batch
        longest = [batch.num_prompt[row] + batch.requests[row].max_tokens for row in rows]
        left: np.ndarray = np.minimum(np.array(longest, np.int64) - 1, self._max_len) - num_tokens
        return left

    @contextmanager
    def with_scratch(self, rows: np.ndarray, ends: np.ndarray) -> Iterator[None]:
        """Gives the rows blocks for drafts up to the positions `ends`; kernels of the model must
        not see them."""
        (own,) = self.batch.tables
        table, held = own.ids, own.num_blocks[rows]
        needed = -(-np.minimum(ends, self._width) // self.batch.block_size)
        lacking = [(r, a, b) for r, a, b in zip(rows, held, needed) if b > a]
        place = 0
        for row, start, end in lacking:
            table[row, start:end] = self._scratch[place : place + end - start]
            place += end - start
        try:
            yield
        finally:
            for row, start, end in lacking:
                table[row, start:end] = 0

    @property
    def _width(self) -> int:
        """Positions of its cache."""
        return int(self.rows.token_ids.shape[1])

    def likeliest(self, hidden: Tensor) -> Tensor:
        """Tokens [S] after those of hidden [S, hidden size]."""
        return self.model.compute_logits(hidden).argmax(-1)

    def draft(
        self, chosen: Chosen, hidden: Tensor, first: np.ndarray, on_device: Tensor | None = None
    ) -> list[Tensor]:
        """The first token of each draft, the second ones of those that have one, and so on. hidden
        [n, hidden size]: of the tokens before. first: the positions that these have in the cache,
        and where the device alone knows them, on_device, the last ones that they may have."""
        found = [self.likeliest(hidden)]
        if chosen.limits[0] == 1:
            return found
        rows, ones, size = chosen.rows, np.ones_like(chosen.rows), self.batch.block_size
        most = np.minimum(first + chosen.limits[0] - 1, self._width - 1)
        whole = self._next_inputs.fill(self.rows, rows, ones, most)
        if on_device is None:
            on_device = to_device(first, hidden.device)
        for step in range(1, int(chosen.limits[0])):
            count = int(np.count_nonzero(chosen.limits > step))
            # Drafts that would end past the last position are cut later.
            ends = np.minimum(first + step + 1, self._width)
            filled, group = _first_of(whole, count, ends)
            filled.input_ids.copy_(found[-1][:count])
            at = (on_device[:count] + step).clamp_(max=self._width - 1)
            filled.positions.copy_(at)
            group.seq_lens.copy_(at + 1)
            blocks = group.block_tables.gather(1, (at // size)[:, None])[:, 0]
            group.slot_mapping.copy_(blocks * size + at % size)
            hidden = self.forward(filled, hidden[:count])
            found.append(self.likeliest(hidden))
        return found

    def by_request(
        self, request_ids: Sequence[str], tokens: Sequence[int], limits: np.ndarray
    ) -> dict[str, list[int]]:
        """Drafts of requests that are still there. tokens: as `draft` gives them, one after the
        other; limits: how many of each there are."""
        drafts: list[list[int]] = [[] for _ in request_ids]
        place = 0
        for step in range(int(limits.max(initial=0))):
            count = int(np.count_nonzero(limits > step))
            for draft, token in zip(drafts, tokens[place : place + count]):
                draft.append(token)
            place += count
        row_of, num_tokens = self.batch.row_of, self.batch.num_tokens
        found = {i: draft for i, draft in zip(request_ids, drafts) if i in row_of}
        rows = np.array([row_of[i] for i in found], np.int64)
        left = self._left(rows, num_tokens[rows]).tolist()
        return {i: draft[:n] for (i, draft), n in zip(found.items(), left) if n > 0}


def _first_of(
    whole: ForwardBatch, count: int, seq_lens: np.ndarray
) -> tuple[ForwardBatch, AttentionBatch]:
    """The first requests of a step of one token each, and where they stand. seq_lens: of all."""
    (group,) = whole.groups
    assert group.host is not None
    first = replace(
        group,
        query_start_loc=group.query_start_loc[: count + 1],
        seq_lens=group.seq_lens[:count],
        block_tables=group.block_tables[:count],
        slot_mapping=group.slot_mapping[:count],
        state_slots=group.state_slots[:count],
        host=HostBatch(np.arange(count + 1), seq_lens[:count], group.host.block_tables[:count]),
    )
    return ForwardBatch(whole.input_ids[:count], whole.positions[:count], (first,)), first
