"""Builds the inputs of one step on the device from the rows of the input batch."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from vllm.model_executor.context import ForwardBatch
from vllm.ops.paged_attention import AttentionBatch, GraphPlanner, HostBatch
from vllm.utils.math_utils import cdiv
from vllm.worker.cuda_graph import PromptShape
from vllm.worker.input_batch import InputBatch
from vllm.worker.input_buffers import InputBuffers, to_device


class Rows(Protocol):
    """What inputs are filled from; as of an InputBatch."""

    token_ids: np.ndarray
    block_table: np.ndarray
    sampled_at: np.ndarray
    state_slots: np.ndarray


class StepInputs:
    """Input buffers of eager steps, and of steps in CUDA graphs at fixed addresses.

    With async scheduling, a step is prepared before the host knows the tokens of the last one: the
    input ids are read from `sampled` (int64 [max_seqs]) on the device.
    """

    def __init__(
        self,
        max_tokens: int,
        max_seqs: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        keeps_draft_states: bool = False,
    ):
        """max_blocks: of one request. keeps_draft_states: steps may have draft tokens, and layers
        recurrent states after each."""
        self._device = device
        self._max_blocks = max_blocks
        self._block_size = block_size
        self.sampled = torch.zeros(max_seqs, dtype=torch.int64, device=device)
        self.planners: list[GraphPlanner] = []  # of host-planned attention
        sizes: dict[str, tuple[type, tuple[int, ...]]] = {
            "input_ids": (np.int64, (max_tokens,)),
            "positions": (np.int64, (max_tokens,)),
            "slot_mapping": (np.int64, (max_tokens,)),
            # A prompt graph has one more request, of padding.
            "query_start_loc": (np.int32, (max_seqs + 2,)),
            "seq_lens": (np.int32, (max_seqs + 1,)),
            "state_slots": (np.int32, (max_seqs + 1,)),
        }
        if keeps_draft_states:
            sizes["draft_slots"] = (np.int32, (max_tokens,))
        self._buffers = InputBuffers(sizes, device)
        if device.type == "cuda":
            self._make_decode_buffers(max_seqs)

    def _make_decode_buffers(self, max_seqs: int) -> None:
        self._decode = InputBuffers(
            {
                "input_ids": (np.int64, (max_seqs,)),
                "positions": (np.int64, (max_seqs,)),
                "slot_mapping": (np.int64, (max_seqs,)),
                "sampled_at": (np.int64, (max_seqs,)),
                "seq_lens": (np.int32, (max_seqs,)),
                "state_slots": (np.int32, (max_seqs,)),
                "is_sampled": (np.bool_, (max_seqs,)),
            },
            self._device,
        )
        self._decode.host["slot_mapping"].fill(-1)
        self._decode.upload()
        one_each = torch.arange(max_seqs + 1, dtype=torch.int32, device=self._device)
        self._decode.device["query_start_loc"] = one_each
        shape = (max_seqs + 1, self._max_blocks)
        self._block_tables = torch.zeros(shape, dtype=torch.int32, device=self._device)
        is_pinned = self._device.type == "cuda"
        staged = torch.zeros((2, *shape), dtype=torch.int32, device="cpu", pin_memory=is_pinned)
        self._staged_tables = list(staged.unbind())
        self._sent_tables = np.empty((0, 0), np.int32)  # the used part of the first

    def fill(
        self,
        batch: Rows,
        rows: np.ndarray,
        counts: np.ndarray,
        starts: np.ndarray,
        read: np.ndarray | None = None,
        shape: PromptShape | None = None,
    ) -> ForwardBatch:
        """`counts` tokens of each of `rows`, from position `starts` on. read: see `read_rows`.
        shape: also fills, with padding, the buffers that `prompt_batch(shape)` reads; the returned
        batch has no padding."""
        size, host, device = self._block_size, self._buffers.host, self._buffers.device
        self._buffers.wait_until_read()
        num_seqs = len(rows)
        query_start_loc = host["query_start_loc"][: num_seqs + 1]
        query_start_loc[0] = 0
        np.cumsum(counts, out=query_start_loc[1:])
        token_rows = np.repeat(rows, counts)
        num_tokens = len(token_rows)
        positions = np.arange(num_tokens) + np.repeat(starts - query_start_loc[:-1], counts)
        slots = batch.block_table[token_rows, positions // size].astype(np.int64) * size
        seq_lens = starts + counts
        max_seq_len = int(seq_lens.max())
        host["input_ids"][:num_tokens] = batch.token_ids[token_rows, positions]
        host["positions"][:num_tokens] = positions
        host["slot_mapping"][:num_tokens] = slots + positions % size
        host["seq_lens"][:num_seqs] = seq_lens
        host["state_slots"][:num_seqs] = batch.state_slots[rows]
        if "draft_slots" in host:
            assert isinstance(batch, InputBatch)
            host["draft_slots"][:num_tokens] = -1
            for request in np.flatnonzero(batch.num_drafts[rows]):
                slots, end = batch.draft_slots_of(rows[request]), query_start_loc[request + 1]
                host["draft_slots"][end - len(slots) : end] = slots
        if shape is not None:
            _pad(host, num_tokens, num_seqs, shape)
        self._buffers.upload()
        input_ids = device["input_ids"][:num_tokens]
        pending = np.flatnonzero(batch.sampled_at[rows] >= 0)
        if len(pending):
            # Such a request has one token in the step, its last.
            places = to_device(query_start_loc[1:][pending].astype(np.int64) - 1, self._device)
            at = to_device(batch.sampled_at[rows[pending]], self._device)
            input_ids.index_copy_(0, places, self.sampled[at])
        tables = batch.block_table[rows, : cdiv(max_seq_len, size)]
        sent = to_device(tables, self._device)
        if shape is not None:
            self._block_tables[:num_seqs, : tables.shape[1]].copy_(sent)
            self._sent_tables = np.empty((0, 0), np.int32)
        filled = _batch(device, num_tokens, num_seqs, sent, int(counts.max()), max_seq_len)
        filled.attention.host = HostBatch(query_start_loc, seq_lens, tables)
        filled.read_rows = None if read is None else to_device(read, self._device)
        return filled

    def pad_prompts(self, shape: PromptShape) -> None:
        """Fills the buffers that `prompt_batch(shape)` reads with padding."""
        self._buffers.wait_until_read()
        self._buffers.host["query_start_loc"][0] = 0
        _pad(self._buffers.host, 0, 0, shape)
        self._buffers.upload()

    def prompt_batch(self, shape: PromptShape) -> ForwardBatch:
        """Inputs at fixed addresses for steps that fit the shape."""
        tokens, seqs = shape
        max_seq_len = self._max_blocks * self._block_size
        tables = self._block_tables[:seqs]
        return _batch(self._buffers.device, tokens, seqs, tables, tokens, max_seq_len)

    def padding(self, num_tokens: int, num_seqs: int = 1, max_seq_len: int = 1) -> ForwardBatch:
        """`num_tokens` tokens without KV slots, spread evenly over `num_seqs` requests of sequence
        length 1. max_seq_len: the bound that kernels size their workspaces by."""
        device = self._buffers.device
        starts = torch.arange(num_seqs + 1, device=self._device) * num_tokens // num_seqs
        device["query_start_loc"][: num_seqs + 1] = starts
        device["slot_mapping"].fill_(-1)
        device["seq_lens"].fill_(1)
        device["state_slots"].fill_(0)
        if "draft_slots" in device:
            device["draft_slots"].fill_(-1)
        tables = torch.zeros_like(device["seq_lens"][:num_seqs])[:, None]
        return _batch(device, num_tokens, num_seqs, tables, cdiv(num_tokens, num_seqs), max_seq_len)

    def fill_decode(
        self, batch: InputBatch, rows: np.ndarray, starts: np.ndarray, size: int
    ) -> None:
        """Fills the buffers that `decode_batch(size)` reads with the next token of each of `rows`;
        there may be none."""
        host, num_seqs, block_size = self._decode.host, len(rows), self._block_size
        self._decode.wait_until_read()
        host["input_ids"][:num_seqs] = batch.token_ids[rows, starts]
        host["positions"][:num_seqs] = starts
        blocks = batch.block_table[rows, starts // block_size].astype(np.int64)
        host["slot_mapping"][:num_seqs] = blocks * block_size + starts % block_size
        host["seq_lens"][:num_seqs] = starts + 1
        host["state_slots"][:num_seqs] = batch.state_slots[rows]
        host["is_sampled"][:num_seqs] = batch.sampled_at[rows] >= 0
        host["sampled_at"][:num_seqs] = np.maximum(batch.sampled_at[rows], 0)
        for name, values in host.items():
            values[num_seqs:size] = -1 if name == "slot_mapping" else 0
        self._decode.upload()
        used = cdiv(int(starts.max(initial=0)) + 1, block_size)
        tables = self._stage_tables(batch.block_table[:, :used], rows)
        for planner in self.planners:
            one_each = HostBatch(np.arange(num_seqs + 1), starts + 1, tables)
            planner.plan_graph((size, self._max_blocks, block_size), one_each)

    def _stage_tables(self, block_table: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Block tables of `rows`, also on the device, where most steps find them unchanged."""
        shape = len(rows), block_table.shape[1]
        # The buffer of the step before the last one, which is over.
        staged = self._staged_tables[1].view(-1)[: shape[0] * shape[1]].view(shape)
        tables = staged.numpy()
        np.take(block_table, rows, axis=0, out=tables)
        if not np.array_equal(tables, self._sent_tables):
            self._staged_tables.reverse()
            self._sent_tables = tables
            self._block_tables[: shape[0], : shape[1]].copy_(staged, non_blocking=True)
        return tables

    def decode_batch(self, size: int) -> ForwardBatch:
        """Inputs at fixed addresses for `size` requests of one token."""
        device, max_seq_len = self._decode.device, self._max_blocks * self._block_size
        batch = _batch(device, size, size, self._block_tables[:size], 1, max_seq_len)
        sampled = self.sampled[device["sampled_at"][:size]]
        batch.input_ids = torch.where(device["is_sampled"][:size], sampled, batch.input_ids)
        return batch


def _batch(
    device: dict[str, Tensor],
    num_tokens: int,
    num_seqs: int,
    block_tables: Tensor,
    max_query_len: int,
    max_seq_len: int,
) -> ForwardBatch:
    """The first tokens and requests of the buffers `device`."""
    draft_slots = device.get("draft_slots")
    return ForwardBatch(
        input_ids=device["input_ids"][:num_tokens],
        positions=device["positions"][:num_tokens],
        attention=AttentionBatch(
            query_start_loc=device["query_start_loc"][: num_seqs + 1],
            seq_lens=device["seq_lens"][:num_seqs],
            block_tables=block_tables,
            slot_mapping=device["slot_mapping"][:num_tokens],
            state_slots=device["state_slots"][:num_seqs],
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            draft_slots=None if draft_slots is None else draft_slots[:num_tokens],
        ),
    )


def _pad(host: dict[str, np.ndarray], num_tokens: int, num_seqs: int, shape: PromptShape) -> None:
    """Pads with empty requests and a last one with the remaining tokens, which has no keys, no KV
    slots and the state slot 0 of padding."""
    of_tokens = {"input_ids": 0, "positions": 0, "slot_mapping": -1, "draft_slots": -1}
    for name in of_tokens.keys() & host.keys():
        host[name][num_tokens : shape.tokens] = of_tokens[name]
    host["query_start_loc"][num_seqs + 1 : shape.seqs] = num_tokens
    host["query_start_loc"][shape.seqs] = shape.tokens
    for name in ("seq_lens", "state_slots"):
        host[name][num_seqs : shape.seqs] = 0
