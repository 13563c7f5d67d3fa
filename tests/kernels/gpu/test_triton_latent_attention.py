"""Triton's attention over latents and its cache writes against float32, with NaN wherever nothing
may be read."""

import pytest
import torch
from triton_device import DEVICE, IS_INTERPRETED, MARKS, needs_gpu

from vllm.kernels import latent_numerics
from vllm.kernels.latent_numerics import LatentCase, latent_write_comparison
from vllm.kernels.select.problem import AttentionProblem, KVQuantProblem
from vllm.kernels.triton import latent_attention as kernels
from vllm.ops.latent_attention import LatentPagedAttention

pytestmark = MARKS
# The interpreter is slow: heads of few columns there.
ONE_TOKEN, DRAFTS = slice(2, 5), slice(2, 6)  # of the requests of a case
SIZES = [(40, 24), (48, 32)] if IS_INTERPRETED else [(576, 512), (320, 256), (40, 24)]


def problem_of(heads: int, sizes=SIZES[0], cache: str = "bf16") -> AttentionProblem:
    return AttentionProblem(heads, 1, sizes[0], cache, "bf16", 0, "MLA", sizes[1])


class Bounded(LatentPagedAttention):
    """What a step on a GPU gives besides, in the interpreter too."""

    def attend(self, q, batch):
        requests = batch.block_tables, batch.query_start_loc, batch.seq_lens
        return kernels.paged_latent_attention(
            q, self.k_cache, *requests, self.scale, self.problem.value_dim, self.k_scale,
            max_query_len=batch.max_query_len, max_seq_len=batch.max_seq_len,
        )  # fmt: skip


def error_of(problem: AttentionProblem, block_size: int = 16) -> float:
    case = LatentCase(problem, block_size, torch.device(DEVICE))
    return case.error(Bounded(kernels.paged_latent_attention, kernels.write_latents, problem))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("cache", ["bf16", "fp8"])
def test_prompts_and_decodes_are_those_of_the_reference(sizes, cache):
    assert 0 < error_of(problem_of(16, sizes, cache)) < 8e-3


@pytest.mark.parametrize("cache", ["bf16", "fp8"])
@pytest.mark.parametrize("heads", [1, 6, 20, 64, 128] if not IS_INTERPRETED else [1, 20, 70])
def test_any_number_of_heads_shares_the_latents(heads, cache):
    assert 0 < error_of(problem_of(heads, cache=cache)) < 8e-3


@pytest.mark.parametrize("block_size", [8, 64, 128])
def test_pages_may_be_smaller_and_larger_than_tiles(block_size):
    assert 0 < error_of(problem_of(4), block_size) < 8e-3


@pytest.mark.parametrize("cache", ["bf16", "fp8"])
def test_latents_are_written_to_their_slots_and_nowhere_else(cache, monkeypatch):
    problem = KVQuantProblem(1, SIZES[0][0], cache, "bf16", "MLA")
    device = torch.device(DEVICE)
    assert latent_write_comparison(problem, "triton", 16, device)() < 0.1


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("cache", ["bf16", "fp8"])
@pytest.mark.parametrize("heads", [1, 16, 70])
def test_few_new_tokens_of_each_request_are_decoded(heads, cache, splits, monkeypatch):
    """Up to as many as there may be, all new or not, with splits that begin among them; without
    the kernel for prompts."""
    requests = ((kernels.MAX_QUERIES,) * 2, (5, 200), (8, 129), (1, 65), (2, 257), (3, 64))
    monkeypatch.setattr(latent_numerics, "REQUESTS", requests)
    monkeypatch.setattr(latent_numerics, "_STEPS", (range(6), range(1, 6), (1,)))
    monkeypatch.setattr(kernels, "splits_of", lambda *_: (splits, 16))
    monkeypatch.setattr(kernels, "_prefill", None)
    assert 0 < error_of(problem_of(heads, cache=cache)) < 8e-3


@pytest.mark.parametrize("part", [ONE_TOKEN, DRAFTS], ids=["one token", "drafts"])
def test_splits_change_a_result_by_rounding_alone(part, monkeypatch):
    """Of the same step with one part for each request, and with as many as there may be."""
    outs = []
    for splits in (1, 8):
        monkeypatch.setattr(kernels, "splits_of", lambda *_, n=splits: (n, 16))
        case = LatentCase(problem_of(6), 16, torch.device(DEVICE))
        kernel = Bounded(kernels.paged_latent_attention, kernels.write_latents, case.problem)
        kernel.k_cache, kernel.k_scale = case.cache, case.k_scale
        decodes = case.requests[part]
        q = torch.cat([one.q for one in decodes])
        latents = torch.cat([one.latents for one in decodes])
        outs.append(kernel(q, latents, case.batch(decodes)).float())
    assert 0 <= float((outs[0] - outs[1]).abs().max()) < 0.05
    assert float((outs[0] - outs[1]).norm() / outs[0].norm()) < 4e-3


def test_rows_of_no_request_are_zeros():
    case = LatentCase(problem_of(4), 16, torch.device(DEVICE))
    batch = case.batch(case.requests[2:4])
    q = torch.full((5, 4, SIZES[0][0]), 1.0, dtype=torch.bfloat16, device=DEVICE)
    kernel = Bounded(kernels.paged_latent_attention, kernels.write_latents, case.problem)
    kernel.k_cache = case.cache
    latents = torch.cat([one.latents for one in case.requests[2:4]])
    kernel.write(latents, batch)
    out = kernel.attend(q, batch)
    assert bool((out[2:] == 0).all()) and bool(out[:2].isfinite().all())


@needs_gpu
@pytest.mark.parametrize("part", [ONE_TOKEN, DRAFTS], ids=["one token", "drafts"])
def test_a_captured_graph_serves_longer_requests_within_its_bounds(part):
    case = LatentCase(problem_of(16), 16, torch.device(DEVICE))
    problem = case.problem
    kernel = Bounded(kernels.paged_latent_attention, kernels.write_latents, problem)
    kernel.k_cache = case.cache
    decodes = case.requests[part]
    batch = case.batch(decodes)
    batch.max_seq_len = 4096
    q = torch.cat([one.q for one in decodes])
    latents = torch.cat([one.latents for one in decodes])
    kernel(q, latents, batch)
    lens = batch.seq_lens.clone()
    batch.seq_lens.fill_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.attend(q, batch)
    batch.seq_lens.copy_(lens)
    graph.replay()
    expected = torch.cat([one.expected for one in decodes])
    assert float((out.float() - expected).norm() / expected.norm()) < 8e-3
