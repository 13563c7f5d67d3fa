"""What proposes draft tokens after a step, and what those of models have in common."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.config.speculative import STEP_DRAFT_TOKENS
from vllm.core.request import Request
from vllm.model_executor.context import ForwardBatch
from vllm.model_executor.models.decoder import CausalLM
from vllm.worker.block_table import BlockTable
from vllm.worker.input_batch import InputBatch
from vllm.worker.step_inputs import StepInputs


class StepTokens(NamedTuple):
    """What a step computed: int64 `counts` of tokens of each of `rows`, from positions `starts` on.
    hidden: of all of them, what the model gave (`CausalLM.forward`); None where it is not read.
    """

    rows: np.ndarray
    counts: np.ndarray
    starts: np.ndarray
    hidden: Tensor | None = None


class Proposals(NamedTuple):
    """drafts: by request. catch_up_seconds: of the time for them, what tokens took that the drafter
    had not seen after the steps before, as of a prompt."""

    drafts: dict[str, list[int]]
    catch_up_seconds: float = 0.0


class Drafter:
    """Proposes nothing. reads_hidden: of all tokens of every step, also of steps after which it
    proposes nothing."""

    reads_hidden = False

    def propose(self, request_ids: Sequence[str], most: int, step: StepTokens) -> Proposals:
        """Up to `most` tokens for each of these requests, whose tokens are all known."""
        return Proposals({})

    def follow(self, step: StepTokens, rows: np.ndarray, tokens: Tensor) -> None:
        """A step after which nothing is proposed, and whose new tokens, int64 [rows], may be on the
        device alone."""

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


class GreedyDrafter(Drafter, ABC):
    """Drafts one token after another, each the likeliest one, for all requests at once.

    Its KV cache has the blocks of the model's, and the same block tables: what a refused draft left
    at a position is overwritten. A draft needs blocks before the scheduler gives the request any:
    those are scratch, and what is in them is computed again.

    ahead: how many tokens what it reads is ahead of its position in the cache.
    """

    ahead = 0

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
        self.model, self.batch, self._max_len = model, batch, max_len
        scheduler = config.scheduler_config
        self._scratch = np.arange(num_blocks, num_blocks + config.num_draft_blocks)
        self.inputs = StepInputs(
            scheduler.max_num_batched_tokens,
            scheduler.max_num_seqs,
            batch.max_blocks,
            batch.block_size,
            device,
        )
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

    def chosen(self, request_ids: Sequence[str], most: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows of those that draft, and how many tokens each, most first."""
        batch = self.batch
        known = [batch.row_of[i] for i in request_ids if most and i in batch.row_of]
        rows = np.array([row for row in known if not batch.wants_pooling[row]], np.int64)
        rows = rows[:STEP_DRAFT_TOKENS]
        if not len(rows):
            return rows, rows
        longest = [batch.num_prompt[row] + batch.requests[row].max_tokens for row in rows]
        num_tokens = batch.num_tokens[rows]
        limits = np.minimum(np.array(longest, np.int64) - 1, self._max_len) - num_tokens
        limits = np.minimum(limits, min(most, STEP_DRAFT_TOKENS // len(rows)))
        order = np.argsort(-limits, kind="stable")
        order = order[limits[order] > 0]
        return rows[order], limits[order]

    def _first(self, rows: np.ndarray) -> np.ndarray:
        """The positions at which the first token of each draft is computed."""
        first: np.ndarray = self.batch.num_tokens[rows] - 1 - self.ahead
        return first

    @contextmanager
    def with_scratch(self, rows: np.ndarray, limits: np.ndarray) -> Iterator[None]:
        """Gives the rows blocks for their drafts; kernels of the model must not see them."""
        (own,) = self.batch.tables
        table, held = own.ids, own.num_blocks[rows]
        needed = -(-(self._first(rows) + limits) // self.batch.block_size)
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

    def likeliest(self, hidden: Tensor) -> Tensor:
        """Tokens [S] after those of hidden [S, hidden size]."""
        return self.model.compute_logits(hidden).argmax(-1)

    def draft(self, rows: np.ndarray, limits: np.ndarray, hidden: Tensor) -> dict[str, list[int]]:
        """Drafts of these rows, from hidden [rows, hidden size] of the tokens before."""
        tokens = self.likeliest(hidden)
        found, first = [tokens], self._first(rows)
        for step in range(1, int(limits[0])):
            own = rows[: np.count_nonzero(limits > step)]
            count = len(own)
            filled = self.inputs.fill(self.rows, own, np.ones_like(own), first[:count] + step)
            filled.input_ids.copy_(tokens[:count])
            hidden = self.forward(filled, hidden[:count])
            tokens = self.likeliest(hidden)
            found.append(tokens)
        drafts: list[list[int]] = [[] for _ in rows]
        on_host, place = torch.cat(found).tolist(), 0
        for tokens in found:
            for draft, token in zip(drafts, on_host[place : place + len(tokens)]):
                draft.append(token)
            place += len(tokens)
        return {self.batch.requests[row].request_id: own for row, own in zip(rows, drafts)}
