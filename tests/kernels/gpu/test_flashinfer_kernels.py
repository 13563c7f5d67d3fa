"""FlashInfer's kernels for Blackwell behind the selector, against the numbers that were rounded;
and, on any GPU, whether the library that is there takes the arguments of all our calls.

Its experts on Hopper: test_moe_backends_on_gpu.py.
"""

from dataclasses import replace

import flashinfer_calls
import pytest
import torch
from weight_only_cases import make_linear, make_moe

pytest.importorskip("flashinfer")

from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import LinearProblem, MoEProblem
from vllm.kernels.select.select import select
from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
from vllm.ops.nvfp4 import (
    nvfp4_dequantize,
    nvfp4_quantize,
)
from vllm.platforms.probe import probe_device, probe_libs
from vllm.utils.fp8 import dequantise_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
NUM_TOKENS = (1, 2, 3, 8, 31, 128, 300, 1025)
BACKENDS = ("flashinfer-cutlass", "flashinfer-trtllm")
SCHEMES = {"fp8-block": ActScheme.DYNAMIC_GROUP128, "nvfp4": ActScheme.NVFP4_GROUP16}
# Of ||y - wanted|| / ||wanted||: of a product, results in bf16 and tokens that the library's
# division rounds to another number; of experts, the same twice.
PRODUCT, EXPERTS = {"fp8-block": 6e-3, "nvfp4": 2e-2}, {"fp8-block": 0.03, "nvfp4": 0.06}


def test_the_library_has_a_place_for_every_argument() -> None:
    assert flashinfer_calls.refused() == []


def winner_of(problem, backend):
    """Skips with the reasons where this machine cannot run it."""
    specs = registry.specs(problem.family)
    decision = select(problem, probe_device(), probe_libs(), Policy(), specs)
    (own,) = [c for c in decision.candidates if c.backend == backend]
    if own.reasons:
        pytest.skip(f"{backend}: {'; '.join(map(str, own.reasons))}")
    return own


def rounded(name, x, input_scale):
    if name == "fp8-block":
        return dequantise_blocks(*per_token_group_quant_fp8(x, 128), (1, 128))
    inverse = input_scale.float().reciprocal().reshape(1)
    return nvfp4_dequantize(*nvfp4_quantize(x, inverse), inverse)


def input_scales(wide, hidden):
    """Of inputs that are as large as Gaussian tokens make them."""
    x = torch.randn(64, hidden, device="cuda")
    between = []
    for gate_up, _ in wide:
        gate, up = (x @ gate_up.T).chunk(2, 1)
        between.append((torch.nn.functional.silu(gate) * up).abs().amax())
    spread = torch.rand(len(wide), 2, device="cuda") + 1
    return {
        "gate_up_input_scales": 6 / 448 / 6 * spread,
        "down_input_scales": 2 * torch.stack(between)[:, None] / 448 / 6,
    }


def assert_near(found, wanted, tolerance):
    assert bool(found.isfinite().all())
    assert float((found.float() - wanted).norm()) < tolerance * float(wanted.norm())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(("shards", "k"), [((256,), 256), ((512, 128, 128), 1024)], ids=str)
def test_products_are_those_of_the_rounded_numbers(shards, k, name, backend) -> None:
    problem = LinearProblem(
        sum(shards), k, WeightFormat.parse(name), (SCHEMES[name],), parts=shards, bias=True
    )
    winner = winner_of(problem, backend)
    tensors, wide = make_linear(name, shards, k, device="cuda")
    tensors.input_scale = torch.tensor(6 / 448 / 6, device="cuda")
    tensors.bias = torch.randn(sum(shards), device="cuda")
    kernel = registry.backend(backend).linear(problem, tensors, winner)
    for num_tokens in NUM_TOKENS:
        x = torch.randn(num_tokens, k, device="cuda").bfloat16()
        wanted = rounded(name, x, tensors.input_scale) @ wide.T + tensors.bias
        assert_near(kernel(x), wanted, PRODUCT[name])
    graph, x = torch.cuda.CUDAGraph(), torch.randn(8, k, device="cuda").bfloat16()
    with torch.cuda.graph(graph):
        y = kernel(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, kernel(x))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SCHEMES)
def test_experts_are_those_of_the_rounded_numbers(name, backend) -> None:
    num_experts, top_k, hidden, inner = 16, 4, 512, 256
    sizes = (num_experts, top_k, hidden, inner)
    problem = MoEProblem(*sizes, WeightFormat.parse(name), (SCHEMES[name],))
    winner = winner_of(problem, backend)
    tensors, wide = make_moe(name, num_experts, hidden, inner, device="cuda")
    if name == "nvfp4":
        tensors = replace(tensors, **input_scales(wide, hidden))
        if backend == "flashinfer-trtllm":  # as `make_moe` hands them over
            tensors = tensors.with_one_input_scale()
    kernel = registry.backend(backend).moe(problem, tensors, winner)
    for num_tokens in NUM_TOKENS:
        x = torch.randn(num_tokens, hidden, device="cuda").bfloat16()
        ids = torch.rand(num_tokens, num_experts, device="cuda").topk(top_k, 1).indices
        ids[torch.rand(ids.shape, device="cuda") < 0.2] = -1
        weights = torch.rand(num_tokens, top_k, device="cuda")
        wanted = torch.zeros(num_tokens, hidden, device="cuda")
        for expert in range(num_experts):
            at, place = (ids == expert).nonzero(as_tuple=True)
            if len(at):
                scales = [part.input_scale for part in tensors.expert(expert)]
                gate, up = (rounded(name, x[at], scales[0]) @ wide[expert][0].T).chunk(2, 1)
                between = rounded(name, torch.nn.functional.silu(gate) * up, scales[1])
                wanted.index_add_(0, at, between @ wide[expert][1].T * weights[at, place][:, None])
        found = kernel(x, weights, ids)
        assert bool((found[(ids < 0).all(1)] == 0).all())
        assert_near(found, wanted, EXPERTS[name])
