"""The exchanges through DeepEP, against a stand-in that keeps its contract between two threads.

DeepEP itself needs GPUs with NVLink or RDMA between them, and has not been run.
"""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from vllm.distributed import deep_ep as ours
from vllm.distributed.all2all import Experts
from vllm.distributed.groups import Group
from vllm.distributed.layout import Layout
from vllm.distributed.make_all2all import make_all2all
from vllm.distributed.parallel import Parallel, planned
from vllm.formats.scales import Scales
from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
from vllm.utils.deep_gemm import get_col_major_tma_aligned_tensor, pack_ue8m0

NUM_RANKS, NUM_EXPERTS, HIDDEN, TOP_K = 2, 8, 512, 3
PER_RANK = NUM_EXPERTS // NUM_RANKS


class Meeting:
    """Every rank leaves something, and gets what all left."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(NUM_RANKS, timeout=20)
        self._left = [None] * NUM_RANKS

    def swap(self, rank: int, thing):
        self._left[rank] = thing
        self._barrier.wait()
        every = [*self._left]
        self._barrier.wait()
        return every


class Buffer:
    """What deep_ep.Buffer documents of the methods that are used, with its types and checks."""

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False,
                 num_qps_per_rank=24):  # fmt: skip
        assert num_rdma_bytes > 0 if low_latency_mode else num_nvl_bytes > 0
        assert not low_latency_mode or num_qps_per_rank == PER_RANK
        self.rank, self._meeting = group.rank, group.rendezvous

    @staticmethod
    def get_dispatch_config(num_ranks):
        assert num_ranks == NUM_RANKS
        return SimpleNamespace(
            get_nvl_buffer_size_hint=lambda row_bytes, ranks: row_bytes * ranks,
            get_rdma_buffer_size_hint=lambda row_bytes, ranks: 0,
        )

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(most, hidden, num_ranks, num_experts):
        return most * hidden * num_experts

    # ------------------------------------------------------------ high throughput

    def get_dispatch_layout(self, topk_idx, num_experts):
        assert topk_idx.dtype == torch.int64 and num_experts == NUM_EXPERTS
        ranks = topk_idx // PER_RANK
        is_in_rank = torch.stack([(ranks == r).any(1) for r in range(NUM_RANKS)], 1)
        per_expert = torch.bincount(topk_idx.flatten(), minlength=num_experts).int()
        return is_in_rank.sum(0).int(), None, per_expert, is_in_rank, "event"

    def dispatch(self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None,
                 is_token_in_rank=None, num_tokens_per_expert=None, topk_idx=None,
                 topk_weights=None):  # fmt: skip
        assert x.dtype == torch.bfloat16 and topk_weights.dtype == torch.float32
        assert torch.equal(num_tokens_per_rank, is_token_in_rank.sum(0).int())
        assert int(num_tokens_per_expert.sum()) == topk_idx.numel()
        every = self._meeting.swap(self.rank, (x, topk_idx, topk_weights, is_token_in_rank))
        rows, ids, weights, sources = [], [], [], []
        for source, (their_x, their_ids, their_weights, their_ranks) in enumerate(every):
            taken = their_ranks[:, self.rank].nonzero()[:, 0]
            own = their_ids[taken] - self.rank * PER_RANK
            is_own = (own >= 0) & (own < PER_RANK)
            rows.append(their_x[taken])
            ids.append(own.masked_fill(~is_own, -1))
            weights.append(their_weights[taken].masked_fill(~is_own, 0.0))
            sources += [(source, int(token)) for token in taken]
        handle = (sources, [len(entry[0]) for entry in every])
        return torch.cat(rows), torch.cat(ids), torch.cat(weights), [], handle, "event"

    def combine(self, x, handle):
        assert x.dtype == torch.bfloat16
        sources, sizes = handle
        sums = [torch.zeros(size, HIDDEN) for size in sizes]
        for (source, token), row in zip(sources, x, strict=True):
            sums[source][token] += row.float()
        every = self._meeting.swap(self.rank, sums)
        return sum(theirs[self.rank] for theirs in every).bfloat16(), None, "event"

    # ------------------------------------------------------------ low latency

    def low_latency_dispatch(self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts,
                             use_fp8=True, round_scale=False, use_ue8m0=False):  # fmt: skip
        most = num_max_dispatch_tokens_per_rank
        assert x.dtype == torch.bfloat16 and len(x) <= most and num_experts == NUM_EXPERTS
        size = most * NUM_RANKS
        blocks = torch.full((PER_RANK, size, HIDDEN), torch.nan, dtype=torch.bfloat16)
        counts, sources = torch.zeros(PER_RANK, dtype=torch.int32), {}
        for source, (their_x, their_ids) in enumerate(self._meeting.swap(self.rank, (x, topk_idx))):
            for token, expert in [(t, e) for t, row in enumerate(their_ids.tolist()) for e in row]:
                own = expert - self.rank * PER_RANK
                if 0 <= own < PER_RANK:
                    place = int(counts[own])
                    blocks[own, place] = their_x[token]
                    sources[own, place] = source, token, expert
                    counts[own] += 1
        if not use_fp8:
            return blocks, counts, sources, "event", None
        assert round_scale and HIDDEN % (512 if use_ue8m0 else 128) == 0
        pairs = [per_token_group_quant_fp8(block, 128, use_ue8m0=True) for block in blocks]
        for (_, scales), count in zip(pairs, counts.tolist(), strict=True):
            scales[count:] = 1.0  # NaN is no power of two
        scales = torch.stack([scales for _, scales in pairs])
        scales = pack_ue8m0(scales) if use_ue8m0 else get_col_major_tma_aligned_tensor(scales)
        return (torch.stack([q for q, _ in pairs]), scales), counts, sources, "event", None

    def low_latency_combine(self, x, topk_idx, topk_weights, handle):
        assert x.shape == (PER_RANK, ours.MAX_LOW_LATENCY_TOKENS * NUM_RANKS, HIDDEN)
        assert x.dtype == torch.bfloat16
        mine = {where: x[place].float() for place, where in handle.items()}
        every = self._meeting.swap(self.rank, mine)
        out = torch.zeros(len(topk_idx), HIDDEN)
        for theirs in every:
            for (source, token, expert), row in theirs.items():
                if source == self.rank:
                    out[token] += topk_weights[token][topk_idx[token] == expert].sum() * row
        return out.bfloat16(), "event", None


WEIGHTS = torch.randn(NUM_EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(1))


def experts_of(own: range, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Experts that scale columns; ids are counted from the first of `own`, negative for none."""
    total = torch.zeros(len(x), HIDDEN)
    for weight, expert in zip(weights.T, ids.T, strict=True):
        is_own = expert >= 0
        total[is_own] += weight[is_own, None] * x[is_own].float() * WEIGHTS[own][expert[is_own]]
    return total.to(x.dtype)


@dataclass
class BatchedExperts:
    """The same, which take blocks of quantised tokens too. expected: guesses at their rows that
    they were given."""

    own: range
    scales: Scales
    expected: list[int] = field(default_factory=list)

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return experts_of(self.own, x, weights, ids)

    def from_quantized(self, q: Tensor, scales: Tensor, counts: Tensor, expected_m: int) -> Tensor:
        self.expected.append(expected_m)
        size = q.shape[1]
        assert q.dtype == torch.float8_e4m3fn and counts.dtype == torch.int32 and size % 128 == 0
        assert scales.shape[:2] == q.shape[:2] and scales.stride()[1:] == (1, size)
        if scales.dtype == torch.int32:
            bytes_of = [scales >> shift & 0xFF for shift in (0, 8, 16, 24)]
            scales = 2.0 ** (torch.stack(bytes_of, -1).flatten(2) - 127).double()
        wide = q.float() * scales.float().repeat_interleave(128, 2)
        results = (wide * WEIGHTS[self.own].unsqueeze(1)).bfloat16()
        for rows, count in zip(results, counts.tolist(), strict=True):
            rows[count:] = torch.nan
        return results


def rank_of(index: int, rendezvous: Meeting, counts: tuple[int, ...]) -> Parallel:
    """Of two engines of one rank each."""
    parallel = planned(Layout(index, data_size=NUM_RANKS), True)
    group = Group(index, NUM_RANKS, (0, 1), SimpleNamespace(rank=index, rendezvous=rendezvous))
    parallel.expert = parallel.data = group
    parallel.num_tokens_across_dp = counts
    return parallel


POWERS_OF_TWO = (Scales.UE8M0, Scales.FLOAT32_CEIL_UE8M0)


@pytest.mark.parametrize(
    ("backend", "form"),
    [
        ("deepep_high_throughput", None),
        ("deepep_high_throughput", Scales.UE8M0),
        *(("deepep_low_latency", form) for form in (None, Scales.FLOAT32, *POWERS_OF_TWO)),
    ],
)
@pytest.mark.parametrize("counts", [(5, 3), (4, 0)])
def test_tokens_come_back_with_the_sum_of_their_experts(monkeypatch, backend, form, counts):
    """form: of the scales of experts that take blocks; None for experts that do not."""
    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=Buffer))
    monkeypatch.setenv("VLLM_ALL2ALL_BACKEND", backend)
    rendezvous = Meeting()
    takes_blocks = backend == "deepep_low_latency" and form in POWERS_OF_TWO

    def run(index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        num_tokens = counts[index]
        x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
        scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
        weights, ids = scores.topk(TOP_K)
        own = range(index * PER_RANK, (index + 1) * PER_RANK)
        all2all = make_all2all(
            rank_of(index, rendezvous, counts), Experts(own, NUM_EXPERTS, HIDDEN)
        )
        kernel = BatchedExperts(own, form) if form else partial(experts_of, own)
        found = all2all(kernel, x, weights, ids)
        if takes_blocks:
            assert kernel.expected == [-(-sum(counts) * TOP_K // NUM_EXPERTS)]
            q, scales = per_token_group_quant_fp8(x, 128, use_ue8m0=True)
            x = (q.float() * scales.repeat_interleave(128, 1)).bfloat16()
        return found, experts_of(range(NUM_EXPERTS), x, weights, ids)

    # One buffer serves all layers of a process; here each thread is one.
    monkeypatch.setattr(ours, "_buffers", ThreadBuffers())
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        for found, wanted in pool.map(run, range(NUM_RANKS)):
            assert found.shape == wanted.shape and found.dtype == wanted.dtype
            # Of bfloat16 sums: what E4M3 costs is in both.
            assert torch.allclose(found.float(), wanted.float(), rtol=0.03, atol=0.03)


def test_packed_scales_need_whole_words_of_four_groups():
    packed, single = (BatchedExperts(range(4), form) for form in POWERS_OF_TWO)
    assert ours.fp8_dispatch(packed, 1024)["use_ue8m0"] and not ours.fp8_dispatch(packed, 640)
    assert ours.fp8_dispatch(single, 640) and "use_ue8m0" not in ours.fp8_dispatch(single, 640)


class ThreadBuffers(threading.local):
    def __init__(self) -> None:
        self._own: dict[str, object] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._own

    def __getitem__(self, name: str) -> object:
        return self._own[name]

    def __setitem__(self, name: str, buffer: object) -> None:
        self._own[name] = buffer
