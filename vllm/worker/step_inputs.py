"""Builds the inputs of one step on the device from the rows of the input batch."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from vllm.model_executor.context import ForwardBatch
from vllm.ops.paged_attention import AttentionBatch, GraphPlanner, HostBatch
from vllm.utils.math_utils import cdiv
from vllm.worker.block_table import BlockTable, StagedTable
from vllm.worker.cuda_graph import PromptShape
from vllm.worker.input_batch import InputBatch
from vllm.worker.input_buffers import InputBuffers, to_device


class Rows(Protocol):
    """What inputs are filled from; as of an InputBatch."""

    token_ids: np.ndarray
    tables: list[BlockTable]
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
        *,
        num_groups: int = 1,
        keeps_draft_states: bool = False,
        verifies_drafts: bool = False,
        for_graphs: bool = True,
    ):
        """max_blocks: of one request. num_groups: cache groups, each with own block tables.
        keeps_draft_states: steps may have draft tokens, and layers recurrent states after each.
        verifies_drafts: captured graphs may be of verification shapes.
        for_graphs: captured graphs read them, on a GPU."""
        self._device = device
        self._num_groups = num_groups
        self._max_blocks = max_blocks
        self._block_size = block_size
        self.sampled = torch.zeros(max_seqs, dtype=torch.int64, device=device)
        # With the padding of a prompt graph, and of a verification shape.
        self._most_seqs = 2 * max_seqs if verifies_drafts else max_seqs + 1
        self.planners: list[tuple[GraphPlanner, int]] = []  # of host-planned attention, by group
        sizes: dict[str, tuple[type, tuple[int, ...]]] = {
            "input_ids": (np.int64, (max_tokens,)),
            "positions": (np.int64, (max_tokens,)),
            "slot_mapping": (np.int64, (num_groups, max_tokens)),
            "query_start_loc": (np.int32, (self._most_seqs + 1,)),
            "seq_lens": (np.int32, (self._most_seqs,)),
            "state_slots": (np.int32, (self._most_seqs,)),
        }
        if keeps_draft_states:
            sizes["draft_slots"] = (np.int32, (max_tokens,))
        self._buffers = InputBuffers(sizes, device)
        if for_graphs and device.type == "cuda":
            self._make_decode_buffers(max_seqs)

    def _make_decode_buffers(self, max_seqs: int) -> None:
        self._decode = InputBuffers(
            {
                "input_ids": (np.int64, (max_seqs,)),
                "positions": (np.int64, (max_seqs,)),
                "slot_mapping": (np.int64, (self._num_groups, max_seqs)),
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
        shape = (self._most_seqs, self._max_blocks)
        self._tables = [StagedTable(shape, self._device) for _ in range(self._num_groups)]

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
        seq_lens = starts + counts
        max_seq_len = int(seq_lens.max())
        host["input_ids"][:num_tokens] = batch.token_ids[token_rows, positions]
        host["positions"][:num_tokens] = positions
        for slots, table in zip(host["slot_mapping"], batch.tables):
            table.pass_windows(rows, starts)
            slots[:num_tokens] = table.slots(token_rows, positions)
        host["seq_lens"][:num_seqs] = seq_lens
        host["state_slots"][:num_seqs] = batch.state_slots[rows]
        if "draft_slots" in host:
            assert isinstance(batch, InputBatch)
            host["draft_slots"][:num_tokens] = -1
            for request in np.flatnonzero(batch.num_drafts[rows]):
                after, end = batch.draft_slots_of(rows[request]), query_start_loc[request + 1]
                host["draft_slots"][end - len(after) : end] = after
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
        tables, sent = self._send_tables(batch, rows, cdiv(max_seq_len, size), shape is not None)
        filled = _batch(device, num_tokens, num_seqs, sent, int(counts.max()), max_seq_len)
        for group, ids in zip(filled.groups, tables):
            group.host = HostBatch(query_start_loc, seq_lens, ids)
        filled.read_rows = None if read is None else to_device(read, self._device)
        return filled

    def _send_tables(
        self, batch: Rows, rows: np.ndarray, used: int, is_captured: bool
    ) -> tuple[list[np.ndarray], list[Tensor]]:
        """The first `used` blocks of the rows of each table, on the host and on the device."""
        if not is_captured:
            tables = [table.ids[rows, :used] for table in batch.tables]
            return tables, [to_device(table, self._device) for table in tables]
        both = [*zip(self._tables, batch.tables)]
        tables = [staged.stage(table.ids[:, :used], rows) for staged, table in both]
        return tables, [staged.device[: len(rows), :used] for staged, _ in both]

    def pad_prompts(self, shape: PromptShape) -> None:
        """Fills the buffers that `prompt_batch(shape)` reads with padding."""
        self._buffers.wait_until_read()
        _pad(self._buffers.host, 0, 0, shape)
        self._buffers.upload()

    def prompt_batch(self, shape: PromptShape) -> ForwardBatch:
        """Inputs at fixed addresses for steps that fit the shape."""
        tokens, longest, seqs = shape
        max_seq_len = self._max_blocks * self._block_size
        tables = [table.device[:seqs] for table in self._tables]
        return _batch(self._buffers.device, tokens, seqs, tables, longest, max_seq_len)

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
        tables = [torch.zeros_like(device["seq_lens"][:num_seqs])[:, None]] * self._num_groups
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
        for slots, table in zip(host["slot_mapping"], batch.tables):
            table.pass_windows(rows, starts)
            slots[:num_seqs] = table.slots(rows, starts)
        host["seq_lens"][:num_seqs] = starts + 1
        host["state_slots"][:num_seqs] = batch.state_slots[rows]
        host["is_sampled"][:num_seqs] = batch.sampled_at[rows] >= 0
        host["sampled_at"][:num_seqs] = np.maximum(batch.sampled_at[rows], 0)
        for name, values in host.items():
            values[..., num_seqs:size] = -1 if name == "slot_mapping" else 0
        self._decode.upload()
        used = cdiv(int(starts.max(initial=0)) + 1, block_size)
        tables = [
            staged.stage(table.ids[:, :used], rows)
            for staged, table in zip(self._tables, batch.tables)
        ]
        for planner, group in self.planners:
            one_each = HostBatch(np.arange(num_seqs + 1), starts + 1, tables[group])
            planner.plan_graph((size, self._max_blocks, block_size), one_each)

    def decode_batch(self, size: int) -> ForwardBatch:
        """Inputs at fixed addresses for `size` requests of one token."""
        device, max_seq_len = self._decode.device, self._max_blocks * self._block_size
        tables = [table.device[:size] for table in self._tables]
        batch = _batch(device, size, size, tables, 1, max_seq_len)
        sampled = self.sampled[device["sampled_at"][:size]]
        batch.input_ids = torch.where(device["is_sampled"][:size], sampled, batch.input_ids)
        return batch


def _batch(
    device: dict[str, Tensor],
    num_tokens: int,
    num_seqs: int,
    block_tables: Sequence[Tensor],
    max_query_len: int,
    max_seq_len: int,
) -> ForwardBatch:
    """The first tokens and requests of the buffers `device`. block_tables: of every cache group."""
    draft_slots = device.get("draft_slots")
    groups = tuple(
        AttentionBatch(
            query_start_loc=device["query_start_loc"][: num_seqs + 1],
            seq_lens=device["seq_lens"][:num_seqs],
            block_tables=tables,
            slot_mapping=slots[:num_tokens],
            state_slots=device["state_slots"][:num_seqs],
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            draft_slots=None if draft_slots is None else draft_slots[:num_tokens],
        )
        for tables, slots in zip(block_tables, device["slot_mapping"])
    )
    return ForwardBatch(device["input_ids"][:num_tokens], device["positions"][:num_tokens], groups)


def _pad(host: dict[str, np.ndarray], num_tokens: int, num_seqs: int, shape: PromptShape) -> None:
    """Pads with requests of up to `shape.longest` tokens, which have no keys, no KV slots and the
    state slot 0 of padding, and then with empty ones."""
    of_tokens = {"input_ids": 0, "positions": 0, "slot_mapping": -1, "draft_slots": -1}
    for name in of_tokens.keys() & host.keys():
        host[name][..., num_tokens : shape.tokens] = of_tokens[name]
    starts = host["query_start_loc"][num_seqs : shape.seqs + 1]
    starts[:] = np.minimum(num_tokens + shape.longest * np.arange(len(starts)), shape.tokens)
    assert starts[-1] == shape.tokens, "the step does not fit the shape"
    for name in ("seq_lens", "state_slots"):
        host[name][num_seqs : shape.seqs] = 0
