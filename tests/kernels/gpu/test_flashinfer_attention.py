"""FlashInfer's attention behind our cache, planned on the host, against float64."""

import numpy as np
import pytest
import torch

pytest.importorskip("flashinfer")
from test_triton_attention import FP8, Batch, assert_close

from vllm.kernels.flashinfer.attention import FlashInferAttention
from vllm.kernels.select.problem import AttentionProblem
from vllm.ops.paged_attention import AttentionBatch, HostBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DECODES = [(1, n) for n in (1, 2, 15, 16, 17, 63, 64, 65, 400, 1000)]
PROMPTS = [(n, n) for n in (1, 2, 15, 33, 129, 300)]
MIXED = [(3, 70), (64, 128), (1, 500), (1, 17), (7, 7)]
REQUESTS = pytest.mark.parametrize("requests", (DECODES, PROMPTS, MIXED))
FP8_CACHE = {"cache_dtype": FP8, "scales": (0.03, 0.05)}


def layer_of(batch: Batch) -> FlashInferAttention:
    """Over the caches of `batch`; what it would write is in them already."""
    _, _, num_kv_heads, dim = batch.k_cache.shape
    cached = "fp8" if batch.k_cache.dtype == FP8 else "bf16"
    num_heads = batch.query.shape[1]
    problem = AttentionProblem(num_heads, num_kv_heads, dim, cached, "bf16", batch.window)
    layer = FlashInferAttention(lambda *_: None, problem)
    layer.k_cache, layer.v_cache = batch.k_cache, batch.v_cache
    layer.k_scale, layer.v_scale = batch.scales
    return layer


def host_of(batch: Batch) -> HostBatch:
    lens = np.array([keys for _, keys in batch.requests])
    return HostBatch(batch.starts.cpu().numpy(), lens, batch.tables.cpu().numpy())


def step_of(batch: Batch, host: HostBatch | None) -> AttentionBatch:
    longest = max(new for new, _ in batch.requests)
    nothing = torch.empty(0)
    return AttentionBatch(
        batch.starts, batch.lens, batch.tables, nothing, nothing, longest, 1000, host
    )


def attend(layer: FlashInferAttention, batch: Batch, host: HostBatch | None) -> torch.Tensor:
    return layer(batch.query, batch.query, batch.query, step_of(batch, host))


@REQUESTS
@pytest.mark.parametrize(
    "options", ({}, FP8_CACHE, {"window": 40}), ids=("bf16", "fp8", "sliding window")
)
@pytest.mark.parametrize("num_heads,num_kv_heads", ((8, 2), (32, 8), (4, 4)))
def test_it_attends(num_heads: int, num_kv_heads: int, options: dict, requests: list) -> None:
    batch = Batch(requests, num_heads, num_kv_heads, **options)
    assert_close(attend(layer_of(batch), batch, host_of(batch)), batch.expected())


@REQUESTS
@pytest.mark.parametrize("dim", (64, 256))
def test_heads_of_other_sizes_attend(dim: int, requests: list) -> None:
    batch = Batch(requests, 16, 2, dim=dim)
    assert_close(attend(layer_of(batch), batch, host_of(batch)), batch.expected())


def test_layers_of_a_step_share_one_plan_and_the_next_step_has_its_own() -> None:
    steps = [Batch(requests) for requests in (MIXED, DECODES, MIXED[::-1], PROMPTS)]
    layers = [layer_of(batch) for batch in steps]
    assert len({id(layer.planner) for layer in layers}) == 1
    for batch, layer in zip(steps, layers, strict=True):
        host = host_of(batch)
        for _ in range(3):
            assert_close(attend(layer, batch, host), batch.expected())


@pytest.mark.parametrize("options", ({}, FP8_CACHE), ids=("bf16", "fp8"))
def test_a_captured_graph_serves_other_lengths_and_free_places(options: dict) -> None:
    size = 6
    batch = Batch([(1, 2000)] * size, **options)
    layer = layer_of(batch)
    attend(layer, batch, None)  # plans for its buffers
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(layer, batch, None)
    for lens in ((2000,) * 6, (3, 16, 17, 700, 1999, 4), (5, 1, 300), (64,)):
        later = Batch([(1, n) for n in lens], **options)
        batch.query[: len(lens)].copy_(later.query)
        for cache, new in ((batch.k_cache, later.k_cache), (batch.v_cache, later.v_cache)):
            cache.view(torch.uint8).zero_()
            cache[: len(new)] = new
        out.fill_(float("nan"))
        layer.planner.plan_graph((*batch.tables.shape, batch.block_size), host_of(later))
        graph.replay()
        assert_close(out[: len(lens)], later.expected())


def test_padding_needs_no_plan() -> None:
    batch = Batch([(5, 5)])
    assert not attend(layer_of(batch), batch, None).any()
