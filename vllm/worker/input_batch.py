"""The running requests as rows of persistent arrays."""

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from vllm.config import VllmConfig
from vllm.core.request import Request
from vllm.errors import ConfigError
from vllm.utils.math_utils import cdiv
from vllm.worker.block_table import BlockTable, TableLayout
from vllm.worker.token_limits import mask_of


class InputBatch:
    """One row per running request. Rows are dense: the last row moves into a gap.

    token_ids: int32 [rows, max_model_len], prompt and output. num_tokens, num_prompt,
    num_computed: int64 [rows]; num_tokens includes tokens that are still on the device. num_drafts:
    int64 [rows], draft tokens of the step, which follow those in token_ids.
    tables: block tables, one for each cache group. sampled_at: int64 [rows], index of the last
    token in the device's sampled tokens, -1 where it is in token_ids. state_slots: int32 [rows],
    slots of recurrent states from 1 on; a request keeps its slot when its row moves, and takes over
    that of the last draft token that is accepted. token_masks: by id of a request with
    allowed_token_ids, int32 [words], as a grammar's (`sampler.ban_others`).
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int = 0,
        layouts: Sequence[TableLayout] = (TableLayout(),),
        num_draft_states: int = 0,
    ):
        """num_draft_states: slots of recurrent states after draft tokens."""
        self.block_size = block_size
        self.max_blocks = cdiv(max_model_len, block_size)  # of one request
        # The system maps zeroed pages on first use: a long max_model_len costs no memory here.
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.tables = [BlockTable(max_num_seqs, max_model_len, block_size, n) for n in layouts]
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_prompt = np.zeros(max_num_seqs, np.int64)
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.num_drafts = np.zeros(max_num_seqs, np.int64)
        self.sampled_at = np.full(max_num_seqs, -1, np.int64)
        self.state_slots = np.zeros(max_num_seqs, np.int32)
        self._free_state_slots = list(range(max_num_seqs + num_draft_states, 0, -1))
        self._keeps_draft_states = num_draft_states > 0
        self._draft_slots: dict[str, list[int]] = {}  # of the step's draft tokens, by request
        self.seeds = np.zeros(max_num_seqs, np.uint64)
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        # Rows that need work of their own; most need none.
        self.may_edit_logits = np.zeros(max_num_seqs, np.bool_)
        self.wants_logprobs = np.zeros(max_num_seqs, np.bool_)
        self.wants_pooling = np.zeros(max_num_seqs, np.bool_)
        self.limits_tokens = np.zeros(max_num_seqs, np.bool_)
        arrays = (value for value in vars(self).values() if isinstance(value, np.ndarray))
        self._row_arrays = [array for array in arrays if array.ndim == 1]
        self.token_masks: dict[str, Tensor] = {}
        self.vocab_size = vocab_size
        self.requests: list[Request] = []
        self.row_of: dict[str, int] = {}

    def add(self, request: Request, num_computed: int) -> None:
        row = len(self.requests)
        self.requests.append(request)
        self.row_of[request.request_id] = row
        tokens, sampling = request.all_token_ids, request.sampling
        self.token_ids[row, : len(tokens)] = array("I", tokens)  # faster than a list
        self.num_tokens[row] = len(tokens)
        self.num_prompt[row] = request.num_prompt_tokens
        self.num_computed[row] = num_computed
        for table in self.tables:
            table.clear(row)
        self.num_drafts[row] = 0
        self.sampled_at[row] = -1
        self.state_slots[row] = self._free_state_slots.pop()
        self.append_blocks(request.request_id, request.block_ids)
        self.seeds[row] = request.seed % 2**64
        self.temperature[row] = 0.0 if sampling.is_greedy else sampling.temperature
        self.top_k[row] = max(sampling.top_k, 0)
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.may_edit_logits[row] = sampling.may_edit_logits
        self.wants_logprobs[row] = sampling.logprobs is not None
        self.wants_pooling[row] = request.pooling is not None
        self.limits_tokens[row] = sampling.allowed_token_ids is not None
        if sampling.allowed_token_ids is not None:
            mask = mask_of(sampling.allowed_token_ids, self.vocab_size)
            self.token_masks[request.request_id] = mask

    def drop(self, request_id: str) -> None:
        row = self.row_of.pop(request_id)
        self.token_masks.pop(request_id, None)
        self._free_state_slots.append(int(self.state_slots[row]))
        last = len(self.requests) - 1
        moved = self.requests.pop()
        if row == last:
            return
        self.requests[row] = moved
        self.row_of[moved.request_id] = row
        for values in self._row_arrays:
            values[row] = values[last]
        num_tokens = self.num_tokens[row]
        self.token_ids[row, :num_tokens] = self.token_ids[last, :num_tokens]
        for table in self.tables:
            table.move(last, row)

    def state_slot(self, request_id: str) -> int:
        return int(self.state_slots[self.row_of[request_id]])

    def draft_slots_of(self, row: int) -> list[int]:
        """Slots of the states after each draft token of the step."""
        return self._draft_slots[self.requests[row].request_id]

    def append_blocks(self, request_id: str, blocks: Sequence[list[int]]) -> None:
        """Of each cache group."""
        row = self.row_of[request_id]
        for table, new in zip(self.tables, blocks):
            if new:
                table.append(row, new)

    def reserve_tokens(self, rows: np.ndarray) -> np.ndarray:
        """Positions of the next token of each of `rows`, which `put_tokens` fills in later. A full
        row finishes with this step: its position is past the end."""
        places: np.ndarray = self.num_tokens[rows]
        self.num_tokens[rows] += places < self.token_ids.shape[1]
        return places

    def put_tokens(self, request_ids: list[str], places: np.ndarray, tokens: np.ndarray) -> None:
        """Fills in reserved tokens; skips requests that are gone."""
        rows = np.array([self.row_of.get(request_id, -1) for request_id in request_ids], np.int64)
        fits = (rows >= 0) & (places < self.token_ids.shape[1])
        self.token_ids[rows[fits], places[fits]] = tokens[fits]

    def put_drafts(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Draft tokens of this step, by request; others have none. All tokens before are known."""
        self.num_drafts.fill(0)
        for slots in self._draft_slots.values():  # of a step without a result
            self._free_state_slots += slots
        self._draft_slots.clear()
        for request_id, tokens in drafts.items():
            row = self.row_of[request_id]
            start = self.num_tokens[row]
            self.token_ids[row, start : start + len(tokens)] = tokens  # or LATER
            self.num_drafts[row] = len(tokens)
            self.sampled_at[row] = -1
            if self._keeps_draft_states:
                assert start == self.num_computed[row] + 1, "drafts follow a single token"
                self._draft_slots[request_id] = [self._free_state_slots.pop() for _ in tokens]

    def append_tokens(self, request_ids: Sequence[str], tokens: Sequence[Sequence[int]]) -> None:
        """New tokens of requests after a step with drafts; what is computed of each are the tokens
        before its last one. Skips requests that are gone."""
        for request_id, new in zip(request_ids, tokens):
            slots = self._draft_slots.pop(request_id, [])
            row = self.row_of.get(request_id)
            if row is not None and slots and len(new) > 1:
                accepted = len(new) - 2  # the last draft token of these
                self.state_slots[row], slots[accepted] = slots[accepted], self.state_slots[row]
            self._free_state_slots += map(int, slots)
            if row is None:
                continue
            start = int(self.num_tokens[row])
            end = min(start + len(new), self.token_ids.shape[1])
            self.token_ids[row, start:end] = new[: end - start]
            self.num_tokens[row] = end
            self.num_computed[row] = start + len(new) - 1


def make_batch(config: VllmConfig, layouts: Sequence[TableLayout]) -> InputBatch:
    """ConfigError, with the flags to lower, where memory is too small."""
    num_seqs, length = config.scheduler_config.max_num_seqs, config.model_config.max_model_len
    try:
        vocab_size = config.model_config.vocab_size
        size, num_draft_states = config.cache_config.block_size, config.num_draft_states
        return InputBatch(num_seqs, length, size, vocab_size, layouts, num_draft_states)
    except MemoryError as error:
        raise ConfigError(
            f"--max-num-seqs {num_seqs} requests of --max-model-len {length} tokens: {error}; "
            f"lower one of them"
        ) from error
