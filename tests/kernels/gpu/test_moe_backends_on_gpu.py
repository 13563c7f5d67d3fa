"""Every backend that computes experts on this GPU, on generated problems; captured graphs.

Besides the package, torch, triton and pytest alone; DeepGEMM where it is installed, and FlashInfer
where its module for experts is built (`python -m vllm.kernels.jit.flashinfer fused_moe_90`: more
than a hundred sources, some minutes of a core each).
"""

import pytest
import torch
from moe_cases import Case, Inputs, check, generate, judged

from vllm.kernels.select.decision import Candidate
from vllm.platforms.probe import probe_device, probe_libs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CASES = generate(40)
BACKENDS = ("cutlass", "deep_gemm", "triton", "marlin",
            "flashinfer-cutlass")  # fmt: skip
LARGE = Case(128, 8, 2048, 768, "fp8-block", 1, "even", 0)  # Qwen3-30B-A3B


def winner_of(case: Case, backend: str) -> Candidate:
    """Skips with what speaks against it."""
    own = judged(case, probe_device(), probe_libs())[backend]
    if own.reasons:
        pytest.skip(f"{backend}: {'; '.join(map(str, own.reasons))}")
    return own


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_backends_compute_what_the_formats_say(case: Case, backend: str):
    check(case, winner_of(case, backend), "cuda")


@pytest.mark.parametrize("num_tokens", [1, 8, 64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_captured_graph_serves_other_tokens_and_other_experts(backend: str, num_tokens: int):
    case = Case(16, 4, 512, 256, "fp8-block", num_tokens, "even", 1)
    winner = winner_of(case, backend)
    inputs = Inputs(case, "cuda")
    kernel = inputs.make(winner)
    held = [inputs.x.clone(), inputs.weights.clone(), inputs.ids.clone()]
    kernel(*held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel(*held)
    for routing in ("uneven", "one expert", "other ranks", "even"):
        other = Inputs(Case(16, 4, 512, 256, "fp8-block", num_tokens, routing, 2), "cuda")
        for mine, theirs in zip(held, (other.x, other.weights, other.ids), strict=True):
            mine.copy_(theirs)
        graph.replay()
        assert torch.equal(y, kernel(*held)), routing


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_call_gives_the_same_bits(backend: str):
    winner = winner_of(LARGE, backend)
    inputs = Inputs(Case(64, 8, 512, 256, "fp8-block", 700, "uneven", 0), "cuda")
    kernel = inputs.make(winner)
    first = kernel(inputs.x, inputs.weights, inputs.ids)
    for _ in range(5):
        assert torch.equal(first, kernel(inputs.x, inputs.weights, inputs.ids))
