"""What the host tells FlashInfer about the cache, and where it knows it from."""

import numpy as np
import pytest
import torch

from vllm.kernels.flashinfer.attention import ragged_pages, workspace_bytes
from vllm.kernels.select.problem import AttentionProblem
from vllm.ops.paged_attention import HostBatch
from vllm.worker.input_batch import InputBatch
from vllm.worker.step_inputs import StepInputs


@pytest.mark.parametrize("page", (16, 64))
@pytest.mark.parametrize(
    "lens", ([1], [16], [17, 1, 64], [5, 300, 16, 33, 1]), ids=lambda lens: str(sum(lens))
)
def test_pages_are_those_of_the_block_tables_and_count_every_key(lens: list, page: int) -> None:
    counts = [-(-n // page) for n in lens]
    tables = np.full((len(lens), max(counts) + 2), -1, np.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = 100 * row + np.arange(count)
    host = HostBatch(np.arange(len(lens) + 1), np.array(lens), tables)
    indptr, indices, last = ragged_pages(host, page)
    assert {x.dtype for x in (indptr, indices, last)} == {np.dtype(np.int32)}
    for row, count in enumerate(counts):
        own = indices[indptr[row] : indptr[row + 1]]
        assert own.tolist() == tables[row, :count].tolist()
        assert (len(own) - 1) * page + last[row] == lens[row]
        assert 1 <= last[row] <= page


def test_no_requests_have_no_pages() -> None:
    nothing = HostBatch(np.zeros(1), np.empty(0, np.int64), np.empty((0, 3), np.int32))
    indptr, indices, last = ragged_pages(nothing, 16)
    assert (indptr.tolist(), indices.tolist(), last.tolist()) == ([0], [], [])


def test_the_host_knows_of_a_step_what_the_device_gets() -> None:
    batch = InputBatch(4, 64, 16)
    table = batch.tables[0].ids
    table[:] = np.arange(table.size).reshape(table.shape)
    inputs = StepInputs(64, 4, batch.max_blocks, 16, torch.device("cpu"))
    rows, counts, starts = np.array([2, 0]), np.array([20, 1]), np.array([13, 40])
    attention = inputs.fill(batch, rows, counts, starts).attention
    assert attention.host is not None
    for name in ("query_start_loc", "seq_lens", "block_tables"):
        on_device, on_host = getattr(attention, name), getattr(attention.host, name)
        assert on_device.tolist() == on_host.tolist()


# What `PrefillPlan` of FlashInfer 0.6.13 lays out on 132 SMs, heads of 128: (query heads, K and V
# heads, requests of a captured graph or 0, tiles, rows of a tile).
PLANS = [
    (32, 8, 4, 33, 16),
    (32, 8, 256, 319, 16),
    (64, 8, 256, 383, 16),  # 191 MiB
    (28, 4, 512, 735, 16),
    (32, 1, 256, 383, 64),
    (71, 1, 64, 264, 128),
    (64, 8, 0, 33, 128),  # a prompt of 40 tokens after 8,960: 133 MiB
    (32, 2, 0, 128, 128),
]


@pytest.mark.parametrize("num_heads, num_kv_heads, graph_size, tiles, rows", PLANS)
def test_the_workspace_holds_what_the_library_lays_out(
    num_heads: int, num_kv_heads: int, graph_size: int, tiles: int, rows: int
) -> None:
    problem = AttentionProblem(num_heads, num_kv_heads, 128, "bf16")
    needed = num_heads * tiles * rows * (128 + 1) * 4
    assert needed <= workspace_bytes(problem, 132, graph_size) <= max(128 << 20, 1.1 * needed)


@pytest.mark.parametrize(("num_tokens", "num_seqs"), [(1, 1), (64, 1), (64, 4), (10, 3), (4, 4)])
def test_padding_is_shared_out_among_the_requests(num_tokens: int, num_seqs: int) -> None:
    inputs = StepInputs(64, 4, 8, 16, torch.device("cpu"))
    batch = inputs.padding(num_tokens, num_seqs, 128)
    attention = batch.attention
    counts = attention.query_start_loc.diff()
    assert len(batch.input_ids) == len(batch.positions) == num_tokens == int(counts.sum())
    assert len(counts) == len(attention.seq_lens) == len(attention.block_tables) == num_seqs
    assert int(counts.min()) > 0 and int(counts.max()) == attention.max_query_len
    assert attention.slot_mapping.tolist() == [-1] * num_tokens
    assert attention.state_slots.tolist() == [0] * num_seqs and attention.max_seq_len == 128
