"""Captured graphs of several sizes, whose logits share memory, give what eager steps give."""

import random

import pytest
import torch

from vllm.worker.cuda_graph import CudaGraphs, bucket_sizes, without_memory

pytestmark = pytest.mark.gpu
HIDDEN, VOCAB, MOST = 256, 50_001, 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [VOCAB, VOCAB - 1], ids=["whole rows", "parts of rows"])
def test_graphs_replay_in_any_order(dtype, columns):
    generator = torch.Generator("cuda").manual_seed(0)
    first = torch.randn(HIDDEN, HIDDEN, device="cuda", generator=generator).to(dtype)
    last = torch.randn(HIDDEN, VOCAB, device="cuda", generator=generator).to(dtype)
    inputs = torch.zeros(MOST, HIDDEN, device="cuda", dtype=dtype)

    def compute(size: int) -> torch.Tensor:
        # Several results on the way, whose memory other graphs take over.
        x = inputs[:size]
        for _ in range(3):
            x = torch.nn.functional.silu(x @ first) / HIDDEN**0.5
        return (x @ last)[:, :columns]

    with torch.inference_mode():
        graphs = CudaGraphs(compute, bucket_sizes(MOST))
        rng = random.Random(0)
        for _ in range(60):
            size = rng.choice(bucket_sizes(MOST))
            inputs.copy_(torch.randn(MOST, HIDDEN, device="cuda", generator=generator))
            found = graphs.replay(size)
            wanted = compute(size)
            # A capture may take another algorithm; what is left of other inputs is far off.
            torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02 * float(wanted.std()))


def test_graphs_do_not_keep_the_logits_of_every_size():
    weight = torch.randn(HIDDEN, VOCAB, device="cuda", dtype=torch.bfloat16)
    inputs = torch.zeros(MOST, HIDDEN, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        inputs @ weight
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        graphs = CudaGraphs(lambda size: inputs[:size] @ weight, bucket_sizes(MOST))
        taken = torch.cuda.memory_reserved() - before
    every = sum(2 * size * VOCAB for size in bucket_sizes(MOST))
    assert graphs.shapes[-1] == MOST and taken < every / 2


def test_sizes_that_do_not_pay_are_not_captured():
    x, seen = torch.randn(8, 8, device="cuda"), {}

    def compute(size: int) -> torch.Tensor:
        torch.cuda._sleep(20_000_000)  # 10 ms
        return x[:size] * 2

    def pays(size: int, launching: float, whole: float) -> bool:
        seen[size] = launching, whole
        return size != 4

    with torch.inference_mode():
        graphs = CudaGraphs(compute, [2, 4, 8], pays=pays)
        assert graphs.shapes == [2, 8] and sorted(seen) == [2, 4, 8]
        assert torch.equal(graphs.replay(8), x * 2)
    assert all(10 * launching < whole for launching, whole in seen.values())


def test_an_alias_is_at_the_place_of_its_tensor():
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn):
        tensor = torch.randn(4, 6, device="cuda").to(dtype)[:, :5]
        alias = without_memory(tensor)
        assert (alias.dtype, alias.shape, alias.stride()) == (dtype, (4, 5), (6, 1))
        assert alias.data_ptr() == tensor.data_ptr()
        assert torch.equal(alias.float(), tensor.float())
