"""Block tables of the running requests, for the layers of one cache group."""

from typing import NamedTuple

import numpy as np
import torch

from vllm.utils.math_utils import cdiv, round_up


class TableLayout(NamedTuple):
    """Where the pool's blocks lie in the caches of a group's layers: block b of the pool is blocks
    b * stride to b * stride + parts - 1 of each. window: tokens that a query sees; 0 for all."""

    parts: int = 1
    stride: int = 1
    window: int = 0


class BlockTable:
    """ids: int32 [rows, max blocks], blocks of the layers' caches in order of position. num_blocks,
    num_passed: int64 [rows], those of a row, and how many of the first lie before its window."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, layout: TableLayout):
        self.layout = layout
        self._block_size = block_size
        most = round_up(cdiv(max_model_len, block_size), layout.parts)
        self.ids = np.zeros((max_num_seqs, most), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.num_passed = np.zeros(max_num_seqs, np.int64)

    def clear(self, row: int) -> None:
        self.num_blocks[row] = self.num_passed[row] = 0

    def append(self, row: int, blocks: list[int]) -> None:
        """Blocks of the pool."""
        parts, start = self.layout.parts, self.num_blocks[row]
        self.num_blocks[row] = end = start + len(blocks) * parts
        if parts == self.layout.stride == 1:
            self.ids[row, start:end] = blocks
        else:
            firsts = np.array(blocks, np.int32)[:, None] * self.layout.stride
            self.ids[row, start:end] = (firsts + np.arange(parts, dtype=np.int32)).ravel()

    def move(self, source: int, target: int) -> None:
        num_blocks = self.num_blocks[source]
        self.ids[target, :num_blocks] = self.ids[source, :num_blocks]
        self.num_blocks[target] = num_blocks
        self.num_passed[target] = self.num_passed[source]

    def pass_windows(self, rows: np.ndarray, starts: np.ndarray) -> None:
        """Names blocks that no token from `starts` on sees after one that `rows` still have: the
        pool gives them to others, and kernels read them at the edge of a tile, to multiply by 0
        what may not be finite there."""
        window, parts = self.layout.window, self.layout.parts
        if not window:
            return
        passed = np.maximum(starts - window + 1, 0) // (parts * self._block_size) * parts
        for index in np.flatnonzero(passed > self.num_passed[rows]):
            row, count = rows[index], passed[index]
            self.ids[row, :count] = self.ids[row, count]
            self.num_passed[row] = count

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int64, as of `AttentionBatch.slot_mapping`."""
        size = self._block_size
        blocks = self.ids[rows, positions // size].astype(np.int64)
        slots: np.ndarray = blocks * size + positions % size
        return slots


class StagedTable:
    """Rows of a block table at a fixed address of the device, which captured graphs read.

    device: int32 [rows, max blocks].
    """

    def __init__(self, shape: tuple[int, int], device: torch.device):
        self.device = torch.zeros(shape, dtype=torch.int32, device=device)
        is_cuda = device.type == "cuda"
        staged = torch.zeros((2, *shape), dtype=torch.int32, device="cpu", pin_memory=is_cuda)
        self._staged = [*zip(staged, [torch.cuda.Event() if is_cuda else None for _ in range(2)])]
        self._sent = np.empty((0, 0), np.int32)  # the used part of the first

    def stage(self, ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """`rows` of the table, also on the device, where most steps find them unchanged."""
        shape = len(rows), ids.shape[1]
        # What was sent before the last time, to be written when it is on the device: a step that
        # samples nothing is not waited for.
        whole, copied = self._staged[1]
        if copied is not None:
            copied.synchronize()
        staged = whole.view(-1)[: shape[0] * shape[1]].view(shape)
        tables: np.ndarray = staged.numpy()
        np.take(ids, rows, axis=0, out=tables)
        if not np.array_equal(tables, self._sent):
            self._staged.reverse()
            self._sent = tables
            self.device[: shape[0], : shape[1]].copy_(staged, non_blocking=True)
            if copied is not None:
                copied.record()
        return tables
