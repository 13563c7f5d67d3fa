"""FP8 checkpoints: the logits of a float32 model with exactly the quantised weights."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from slow import quick
from tiny_models import VOCAB, build_model
from transformers import AutoModelForCausalLM

from vllm import LLM, SamplingParams
from vllm.model_executor.quantize import quantize_checkpoint
from vllm.utils.fp8 import per_block_cast_to_fp8

# No dimension is a multiple of 128, and merged layers have shards that end inside a block.
SHAPE = {
    "hidden_size": 180,
    "intermediate_size": 304,
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "num_hidden_layers": 2,
}
PROMPT = [(7 * i + 3) % VOCAB for i in range(50)]


def logprobs(folder, **options) -> torch.Tensor:
    llm = LLM(folder, skip_tokenizer_init=True, max_num_seqs=4, **options)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=VOCAB)
    output = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)[0]
    return torch.tensor([[e[i].logprob for i in range(VOCAB)] for e in output.prompt_logprobs[1:]])


@torch.inference_mode()
def reference_logprobs(folder, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of a transformers model in float32 whose linear weights are replaced by `weights`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    missing = model.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    return torch.log_softmax(model(torch.tensor([PROMPT])).logits[0, :-1], -1)


def dequantise(tensors: dict[str, torch.Tensor], block=(128, 128)) -> dict[str, torch.Tensor]:
    """float32 weights of an FP8 block checkpoint, element by element: w = q * scale."""
    result = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            scales = tensors.get(name + "_scale_inv", tensors.get(name + "_scale"))
            rows = torch.arange(tensor.shape[0]) // block[0]
            columns = torch.arange(tensor.shape[1]) // block[1]
            result[name] = tensor.float() * scales[rows][:, columns]
    return result


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def source(request, checkpoint):
    return checkpoint(request.param, **SHAPE)


@pytest.fixture(scope="module")
def block_checkpoint(source, tmp_path_factory):
    target = tmp_path_factory.mktemp("fp8") / "block"
    quantize_checkpoint(source, target, "fp8-block")
    return target


def test_block_checkpoint_matches_its_dequantised_weights(source, block_checkpoint):
    weights = dequantise(load_file(block_checkpoint / "model.safetensors"))
    assert len(weights) == 2 * 7
    wanted = reference_logprobs(source, weights)
    assert (logprobs(block_checkpoint) - wanted).abs().max() < 1e-4
    plain = reference_logprobs(source, {})
    assert (wanted - plain).abs().max() > 1e-2, "quantisation must be visible for this to test it"


def test_quantising_at_load_equals_quantising_before(source, block_checkpoint):
    assert torch.equal(logprobs(source, quantization="fp8"), logprobs(block_checkpoint))


def test_reference_kernels_agree_on_a_block_checkpoint(block_checkpoint):
    native = logprobs(block_checkpoint)
    assert (logprobs(block_checkpoint, linear_backend="torch") - native).abs().max() < 1e-4


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
@pytest.mark.parametrize("names", quick(["ours", "transformers"], ["ours"]))
def test_per_tensor_checkpoint_matches_its_dequantised_weights(source, tmp_path, scheme, names):
    weight_scale = {"ours": "weight_scale", "transformers": "weight_scale_inv"}[names]
    input_scale = {"ours": "input_scale", "transformers": "activation_scale"}[names]
    stored, wanted = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stored[name] = tensor
        if "_proj.weight" in name:
            quantised, scale = per_block_cast_to_fp8(tensor, tensor.shape)
            stored[name] = quantised
            stored[name.replace("weight", weight_scale)] = scale[0, 0].clone()
            wanted[name] = quantised.float() * scale
            if scheme == "static":
                stored[name.replace("weight", input_scale)] = torch.tensor(0.01)
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": scheme}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (logprobs(tmp_path) - reference_logprobs(source, wanted)).abs().max() < 1e-4


def test_layers_that_are_not_to_be_converted_stay_as_they_are(source, tmp_path):
    stored, wanted = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stored[name] = tensor
        if "_proj.weight" in name and "layers.0.mlp" not in name:
            quantised, scales = per_block_cast_to_fp8(tensor)
            stored[name], stored[name + "_scale_inv"] = quantised, scales
    wanted = dequantise(stored)
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.layers.0.mlp", "lm_head"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (logprobs(tmp_path) - reference_logprobs(source, wanted)).abs().max() < 1e-4


def test_bf16_weights_keep_their_bits_under_float32_activations(tmp_path):
    build_model("llama", **SHAPE).bfloat16().save_pretrained(tmp_path)
    assert (logprobs(tmp_path) - reference_logprobs(tmp_path, {})).abs().max() < 1e-4


def test_block_cast_reaches_the_largest_value_and_survives_zeros():
    x = torch.zeros(130, 200)
    x[:128, :128] = torch.linspace(-3, 3, 128)
    quantised, scales = per_block_cast_to_fp8(x)
    assert scales.shape == (2, 2)
    assert quantised.float().abs().max() == 448
    assert torch.equal(scales[1], torch.ones(2))
    error = (quantised.float() * scales.repeat_interleave(128, 0)[:130].repeat_interleave(
        128, 1)[:, :200] - x).abs().max()  # fmt: skip
    assert error <= 3 / 448 * 16  # half a step of the largest binade, [256, 448]


def test_ue8m0_scales_are_powers_of_two_and_not_smaller():
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    _, plain = per_block_cast_to_fp8(x)
    _, rounded = per_block_cast_to_fp8(x, use_ue8m0=True)
    assert torch.equal(torch.exp2(torch.log2(rounded).round()), rounded)
    assert bool(((rounded >= plain) & (rounded < 2 * plain)).all())


def test_weights_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="NaN or infinity"):
        per_block_cast_to_fp8(torch.tensor([[1.0, float("nan")]]))
