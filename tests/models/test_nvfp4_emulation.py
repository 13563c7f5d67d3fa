"""NVFP4 with quantised activations (W4A4) beside weight-only (W4A16), emulated on the CPU."""

import pytest
import torch
from checkpoint_layouts import LAYOUTS, SHAPE, store
from safetensors.torch import load_file, save_file
from test_qwen3_moe import PROMPT, load, prompt_logprobs

from vllm.model_executor.layers.fused_moe.layer import FusedMoE
from vllm.model_executor.layers.linear import Linear
from vllm.ops.nvfp4 import (
    nvfp4_dequantize,
    nvfp4_quantize,
)

INPUT_SCALE = 0.01  # of tests/checkpoint_layouts.py
MOE = {
    "hidden_size": 128,
    "moe_intermediate_size": 256,
    "num_attention_heads": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
}
NATIVE = {"linear_backend": "emulate:sm_100", "moe_backend": "emulate:sm_100"}
WEIGHT_ONLY = {"linear_backend": "emulate:sm_90", "moe_backend": "emulate:sm_90"}
LAYER = "model.layers.1.mlp"


@pytest.fixture(scope="module", params=["modelopt-nvfp4", "ct-nvfp4"])
def stored(request, checkpoint, tmp_path_factory):
    """stored(model) -> (folder, float32 weights)"""
    made = {}

    def make(model):
        if model not in made:
            folder = tmp_path_factory.mktemp(request.param)
            source = checkpoint(model, **(MOE if model == "qwen3_moe" else SHAPE))
            made[model] = folder, store(source, folder, *LAYOUTS[request.param])
        return made[model]

    return make


def find(llm, name):
    return llm.llm_engine.core.runner.model.get_submodule(name)


def rounded(x):
    """bfloat16 activations as NVFP4 sees them, in float32."""
    divisor = torch.tensor([1 / INPUT_SCALE])
    return nvfp4_dequantize(*nvfp4_quantize(x.bfloat16(), divisor), divisor)


def wide(x):
    return x.bfloat16().float()


@torch.inference_mode()
@pytest.mark.parametrize(("backends", "seen"), [(NATIVE, rounded), (WEIGHT_ONLY, wide)])
def test_a_linear_layer_multiplies_what_the_chip_would(stored, backends, seen):
    folder, weights = stored("llama")
    llm = load(folder, linear_backend=backends["linear_backend"])
    layer = find(llm, f"{LAYER}.down_proj")
    assert isinstance(layer, Linear)
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(0))
    wanted = wide(seen(x) @ weights[f"{LAYER}.down_proj.weight"].T)
    assert torch.allclose(layer.kernel(x), wanted, rtol=2**-7, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize(("backends", "seen"), [(NATIVE, rounded), (WEIGHT_ONLY, wide)])
def test_experts_multiply_what_the_chip_would(stored, backends, seen):
    folder, weights = stored("qwen3_moe")
    llm = load(folder, **backends)
    layer = find(llm, f"{LAYER}.experts")
    assert isinstance(layer, FusedMoE)
    x = torch.randn(12, 128, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(12)[:, None] % 4
    wanted = torch.zeros(12, 128)
    for token, expert in enumerate(ids[:, 0].tolist()):

        def projection(values, part, expert=expert):
            return wide(seen(values) @ weights[f"{LAYER}.experts.{expert}.{part}.weight"].T)

        one = x[token : token + 1]
        inner = torch.nn.functional.silu(projection(one, "gate_proj"))
        inner = wide(inner * projection(one, "up_proj"))
        wanted[token] = projection(inner, "down_proj")[0]
    found = layer.kernel(x, torch.ones(12, 1), ids)
    error = (found - wanted).norm() / wanted.norm()
    # A value beside a tie between two codes may fall to either side.
    assert error < 0.01
    other = wide if seen is rounded else rounded
    assert (seen(x) - other(x)).norm() / x.norm() > 0.02, "or this does not see the rounding"


@torch.inference_mode()
def test_a_kernel_with_one_input_scale_takes_the_largest_and_the_ledger_says_so(
    checkpoint, tmp_path
):
    store(checkpoint("qwen3_moe", **MOE), tmp_path, *LAYOUTS["modelopt-nvfp4"])
    file, expert = tmp_path / "model.safetensors", f"{LAYER}.experts.2"
    tensors = load_file(file)
    for part in ("gate_proj", "up_proj"):
        tensors[f"{expert}.{part}.input_scale"] *= 3
    save_file(tensors, file)
    found = []
    for backend in ("flashinfer-trtllm", "flashinfer-cutlass"):
        llm = load(tmp_path, moe_backend=f"emulate:{backend}@sm_100")
        layer = find(llm, f"{LAYER}.experts")
        x = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
        found.append(layer.kernel(x, torch.ones(4, 1), torch.arange(4)[:, None]))
        entries = [entry for entry in layer.selection.ledger.entries if entry.of_inputs]
        if backend == "flashinfer-cutlass":  # one for each expert
            assert not entries
            continue
        assert [entry.layer for entry in entries] == [
            f"model.layers.{i}.mlp.experts.gate_up" for i in range(2)
        ]
        assert [entry.is_exact for entry in entries] == [True, False]
        # Three of four scales are three times as large.
        wanted = (3 * 2**2 / (3 + 3**2)) ** 0.5
        assert entries[1].relative_error == pytest.approx(wanted, rel=1e-5)
        assert entries[1].max_error == pytest.approx(2 * INPUT_SCALE, rel=1e-5)
    one, own = found
    assert torch.equal(one[2], own[2]) and not torch.equal(one[0], own[0])


def test_quantised_activations_cost_more_than_weights_alone(stored):
    folder, _ = stored("qwen3_moe")
    exact = prompt_logprobs(load(folder), [PROMPT])[0]
    costs = {}
    for name, backends in (("w4a4", NATIVE), ("w4a16", WEIGHT_ONLY)):
        costs[name] = (prompt_logprobs(load(folder, **backends), [PROMPT])[0] - exact).abs().mean()
    assert 0 < costs["w4a16"] < costs["w4a4"] / 3
