"""Every pair of model and format that published checkpoints are served in loads and has the
log-probabilities of the weights it stores: tiny models with the quantization_config of the list."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_layouts import (
    awq,
    ct_fp8_block,
    ct_fp8_channel,
    ct_fp8_tensor,
    ct_int4,
    ct_int8,
    ct_nvfp4,
    fp8,
    gptq,
    modelopt_fp8,
    modelopt_nvfp4,
    plain_mxfp4,
)
from safetensors.torch import load_file, save_file
from test_mla_kin import write_large
from test_qwen3_moe import logprobs, write

from vllm.architectures.registry import known
from vllm.formats.readers.registry import resolve_quantization
from vllm.kernels.report import published

# Whole groups of 128 everywhere.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}
SIZES |= {"num_hidden_layers": 2}
EXPERTS = SIZES | {"moe_intermediate_size": 128}
LATENT = EXPERTS | {"num_key_value_heads": 8, "kv_lora_rank": 128, "q_lora_rank": 128}
LATENT |= {"v_head_dim": 16}
HYBRID = {"linear_key_head_dim": 32, "linear_value_head_dim": 16, "num_hidden_layers": 4}
HYBRID |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
SHARED = {"shared_expert_intermediate_size": 128}
# Model of the list -> (test model, its sizes).
MODELS = {
    "deepseek_v3": ("deepseek_v3", LATENT),
    "kimi_k2": ("deepseek_v3", LATENT),
    "kimi_k25": ("kimi_k25-multimodal", LATENT),
    "mistral_large3": ("mistral4-multimodal", LATENT),
    "mistral4": ("mistral4-multimodal", LATENT),
    "ministral3": ("mistral3", SIZES | {"model_type": "ministral3"}),
    "glm4_moe": ("glm4_moe", EXPERTS),
    "gemma4": ("gemma4-multimodal", EXPERTS | {"num_key_value_heads": 4, "num_hidden_layers": 3}),
    "afmoe": ("afmoe", EXPERTS | {"num_hidden_layers": 3}),
    "mimo_v2_flash": ("mimo_v2_flash", EXPERTS | {"num_hidden_layers": 3}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", SIZES | {"moe_intermediate_size": 256}),
    "hy_v3": ("hy_v3", EXPERTS | {"num_hidden_layers": 4}),
    "minimax_m2": ("minimax_m2", SIZES | {"intermediate_size": 128}),
    "llama": ("llama", SIZES),
    "phi3": ("phi3", SIZES),
    "qwen3": ("qwen3", SIZES),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "qwen3_next": ("qwen3_next", EXPERTS | HYBRID | SHARED),
    "qwen3_5": ("qwen3_5-multimodal", SIZES | HYBRID),
    "qwen3_5_moe": ("qwen3_5_moe-multimodal", EXPERTS | HYBRID | SHARED),
}
# Both formats of gpt-oss: test_gpt_oss.py and test_quark.py.
ELSEWHERE = {"gpt_oss"}
NOT_QUANTISED = (".gate", "_gate", ".gate.wg", ".router.proj", "lm_head", "embed_tokens")


def fp8_block(weight):
    stored, wide = ct_fp8_block(weight)
    return {"weight": stored["weight"], "weight_scale_inv": stored["weight_scale"]}, wide


def fp8_static(weight):
    """As transformers stores it."""
    scale = np.float32(np.abs(weight).max() / 448)
    stored, wide = fp8(weight, scale, scale)
    own = {"weight": stored["weight"], "weight_scale_inv": stored["weight_scale"]}
    return own | {"activation_scale": torch.tensor(0.05)}, wide


def by_part(mlp, others):
    return lambda name: mlp if ".mlp." in name else others


# Format of the list -> how a weight of that name is stored.
BUILDS = {
    "fp8 128x128": fp8_block,
    "fp8 per tensor": fp8_static,
    "modelopt FP8": modelopt_fp8,
    "modelopt NVFP4": modelopt_nvfp4,
    "modelopt MIXED_PRECISION": by_part(modelopt_nvfp4, modelopt_fp8),
    "compressed-tensors fp8 per channel": ct_fp8_channel,
    "compressed-tensors fp8 128x128": ct_fp8_block,
    "compressed-tensors fp8 per tensor": ct_fp8_tensor,
    "compressed-tensors nvfp4": ct_nvfp4,
    "compressed-tensors nvfp4 and fp8": by_part(ct_nvfp4, ct_fp8_block),
    "compressed-tensors int4, groups of 32": ct_int4(32),
    "compressed-tensors int8": ct_int8(),
    "awq int4": awq(128),
    "gptq int4": gptq(),
    "quark mxfp4": plain_mxfp4,
}
LIST = json.loads((Path(published.__file__).parent / "published_checkpoints.json").read_text())
SERVED = {one.name for one in published.checkpoints() if one.status == published.SERVED}
PAIRS = sorted({(r["model"], r["format"]) for r in LIST["checkpoints"] if r["name"] in SERVED})


def source_of(model, checkpoint, tmp_path):
    """A checkpoint in floating point whose config.json names the model of the list."""
    name, sizes = MODELS[model]
    source = checkpoint(name, **sizes)
    if model == "mistral_large3":
        write_large(source, tmp_path / "large")
        return tmp_path / "large"
    if model == "kimi_k2":
        tensors = load_file(source / "model.safetensors")
        return write(source, tmp_path / "kimi", tensors, model_type="kimi_k2")
    return source


def one_by_one(tensors):
    """Stacks of experts as transformers writes them, as the weights of each."""
    for name, tensor in tensors.items():
        parent, _, last = name.rpartition(".")
        if not parent.endswith(".experts"):
            yield name, tensor
            continue
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        for expert, own in enumerate(tensor):
            for part, weight in zip(parts, own.chunk(len(parts)), strict=True):
                yield f"{parent}.{expert}.{part}.weight", weight.contiguous()


@pytest.mark.slow
@pytest.mark.parametrize(("model", "name"), [one for one in PAIRS if one[0] not in ELSEWHERE])
def test_a_pair_that_counts_as_served_is(checkpoint, tmp_path, model, name):
    if model not in MODELS:
        pytest.skip(f"no tiny {model} here")
    source = source_of(model, checkpoint, tmp_path)
    config = json.loads((source / "config.json").read_text())
    reader = resolve_quantization(LIST["formats"][name], None, "")
    slot_name = known()[config["model_type"]].slot_name
    stored, wide, build = {}, {}, BUILDS[name]
    for key, tensor in one_by_one(load_file(source / "model.safetensors")):
        stored[key] = wide[key] = tensor
        layer = slot_name(key.removesuffix(".weight"))
        is_linear = key.endswith(".weight") and tensor.ndim == 2 and layer is not None
        is_plain = layer is None or layer.endswith(NOT_QUANTISED)
        if not is_linear or is_plain or reader.stored_layer([layer]) is None:
            continue
        own = build(layer) if name in ("modelopt MIXED_PRECISION",
                                       "compressed-tensors nvfp4 and fp8") else build  # fmt: skip
        pieces, weight = own(tensor.numpy())
        del stored[key]
        stem = key.removesuffix("weight")
        stored |= {stem + part: piece.contiguous() for part, piece in pieces.items()}
        wide[key] = torch.from_numpy(weight)
    assert len(stored) > len(wide)
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "config.json").write_text(json.dumps(config))
    save_file(wide, tmp_path / "wide" / "model.safetensors", metadata={"format": "pt"})
    quantised = write(source, tmp_path / "q", stored, quantization_config=LIST["formats"][name])
    found, wanted = logprobs(quantised), logprobs(tmp_path / "wide")
    assert (found - wanted).abs().max() < 1e-3
    assert (found - logprobs(source)).abs().max() > 1e-3


def test_every_model_of_the_pairs_is_known_to_some_test():
    models = {model for model, _ in PAIRS}
    assert {*MODELS, *ELSEWHERE} <= models
    assert {name for model, name in PAIRS if model in MODELS} <= BUILDS.keys()
