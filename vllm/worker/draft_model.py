"""Models that draft: heads, and smaller models with the same vocabulary, whose drafts are here."""

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.config.drafting import draft_parallel
from vllm.config.selection import Facts, selection_for
from vllm.config.speculative import DRAFT_PREFIX, EAGLE3
from vllm.core.request import Request
from vllm.distributed.parallel import Parallel
from vllm.kernels.selection import Selection
from vllm.model_executor.context import ForwardBatch
from vllm.model_executor.model_loader import load_head, load_model
from vllm.model_executor.models.decoder import CausalLM
from vllm.model_executor.models.eagle3 import Eagle3Head
from vllm.worker.drafts import GreedyDrafter, Proposals
from vllm.worker.input_batch import InputBatch


def load_draft_model(
    config: VllmConfig, selection: Selection, parallel: Parallel
) -> CausalLM | Eagle3Head | None:
    """None where no model drafts. Its decisions are listed with those of `selection`."""
    drafts = config.speculative_config
    if drafts is None or drafts.draft_model_config is None:
        return None
    own = VllmConfig(
        model_config=drafts.draft_model_config,
        cache_config=config.cache_config,
        scheduler_config=config.scheduler_config,
        parallel_config=draft_parallel(drafts.draft_model_config, config.parallel_config),
        kernel_config=config.kernel_config,
    )
    facts = Facts(selection.device, selection.libs, selection.known, selection.variables)
    preferences = own.kernel_config.preferences(own.quant_config)
    chooses = selection_for(facts, preferences, own.model_config.model_type)
    beside = chooses.beside(selection, DRAFT_PREFIX)
    if drafts.method == EAGLE3:
        return load_head(own, beside, parallel)
    return load_model(own, beside, parallel, is_draft=True)


class ModelDrafter(GreedyDrafter):
    """Computes the tokens that are new since the last draft, then drafts.

    It is as far behind as nothing was drafted, and catches up by a step's tokens at a time, those
    first that lack least; who lacks more drafts nothing yet. A block whose tokens it has all
    computed serves later requests that find it in the prefix cache.
    """

    def __init__(
        self,
        model: CausalLM,
        batch: InputBatch,
        config: VllmConfig,
        num_blocks: int,
        max_len: int,
        device: torch.device,
    ):
        super().__init__(model, batch, config, num_blocks, max_len, device)
        self._budget = config.scheduler_config.max_num_batched_tokens
        self._num_computed: dict[str, int] = {}
        self._is_filled = np.zeros(num_blocks, np.bool_)

    def add(self, request: Request, num_computed: int) -> None:
        num_cached = num_computed // self.batch.block_size
        self.take(request.block_ids[0][num_cached:])
        found = self._is_filled[request.block_ids[0][:num_cached]]
        num_filled = num_cached if found.all() else int(found.argmin())
        self._num_computed[request.request_id] = num_filled * self.batch.block_size

    def take(self, blocks: Sequence[int]) -> None:
        self._is_filled[list(blocks)] = False

    def drop(self, request_id: str) -> None:
        del self._num_computed[request_id]

    def forward(self, filled: ForwardBatch, hidden: Tensor) -> Tensor:
        given: Tensor = self.model(filled)
        return given

    def propose(self, request_ids: Sequence[str], most: int) -> Proposals:
        if not most:
            return Proposals({})
        begin, batch = time.perf_counter(), self.batch
        known = [batch.row_of[i] for i in request_ids if i in batch.row_of]
        asked = np.array([row for row in known if not batch.wants_pooling[row]], np.int64)
        chosen = self.chosen(asked, batch.num_tokens[asked], most)
        behind, counts, starts = self._behind(chosen.rows)
        if not len(behind):
            return Proposals({})
        last = np.full(len(batch.requests), -1)
        last[behind] = np.cumsum(counts) - 1
        reached = np.zeros(len(batch.requests), np.int64)
        reached[behind] = starts + counts
        chosen = chosen.only(reached[chosen.rows] == batch.num_tokens[chosen.rows])
        rows, limits, drafts = chosen.rows, chosen.limits, {}
        first = batch.num_tokens[rows] - 1
        with self.with_scratch(rows, first + limits):
            read = last[rows] if len(rows) else last[behind[-1:]]
            hidden = self.model(self.inputs.fill(self.rows, behind, counts, starts, read))
            self._note(behind, starts, reached[behind])
            num_new = int(np.minimum(counts, most + 1).sum()) if len(rows) else 0
            share = 1 - num_new / int(counts.sum())
            if share and hidden.is_cuda:
                torch.cuda.synchronize()
            seconds = share * (time.perf_counter() - begin)
            if len(rows):
                tokens = torch.cat(self.draft(chosen, hidden, first)).tolist()
                ids = [batch.requests[row].request_id for row in rows]
                drafts = self.by_request(ids, tokens, limits)
        return Proposals(drafts, seconds)

    def _behind(self, drafting: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows with tokens to compute, how many of each in this step, and from where on. drafting:
        rows that need all of their tokens; of others those count that the model has computed."""
        batch = self.batch
        rows = np.array(
            [row for row in range(len(batch.requests)) if not batch.wants_pooling[row]], np.int64
        )
        ends = batch.num_computed.copy()
        ends[drafting] = batch.num_tokens[drafting]
        starts = np.array(
            [self._num_computed[batch.requests[r].request_id] for r in rows], np.int64
        )
        lack = np.maximum(np.minimum(ends[rows], self._max_len) - starts, 0)
        order = np.argsort(lack, kind="stable")
        left = self._budget - (np.cumsum(lack[order]) - lack[order])
        counts = np.minimum(lack[order], left)
        order, counts = order[counts > 0], counts[counts > 0]
        return rows[order], counts, starts[order]

    def _note(self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """What is computed now, but in scratch blocks."""
        batch, size = self.batch, self.batch.block_size
        ends = np.minimum(ends, batch.tables[0].num_blocks[rows] * size)
        for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist()):
            self._num_computed[batch.requests[row].request_id] = end
            self._is_filled[batch.tables[0].ids[row, start // size : end // size]] = True
