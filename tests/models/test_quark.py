"""AMD Quark checkpoints whose layers have different formats, or inputs that are scaled."""

import numpy as np
import pytest
import torch
from checkpoint_layouts import LAYOUTS, QUARK, SHAPE, fp8, mxfp4, plain_mxfp4, store_each
from safetensors.torch import load_file
from test_latent_attention import logprobs as logprobs_of_mla
from test_latent_attention import reference
from test_qwen3_moe import logprobs, reference_logprobs, write

CONFIG = LAYOUTS["quark-mxfp4"][1]
FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "ch_axis": None}
ROWS = FP8 | {"qscheme": "per_channel", "ch_axis": 0}
TOKENS = ROWS | {"ch_axis": 1, "is_dynamic": True}


def scheme(weight, inputs, outputs=None):
    return {"weight": weight, "input_tensors": inputs, "output_tensors": outputs, "bias": None}


def fp8_rows(weight):
    """Scales as Quark keeps them, [rows]."""
    scales = np.abs(weight).max(1, keepdims=True) / np.float32(448)
    stored, wide = fp8(weight, scales, scales)
    return stored | {"weight_scale": stored["weight_scale"].flatten()}, wide


def test_experts_of_gpt_oss_in_mxfp4_with_inputs_in_fp8(checkpoint, tmp_path):
    """As Quark stores them: each on its own, gate and up apart. Inputs are multiplied as they are:
    their scales, which no layer here needs, may be anything."""
    source = checkpoint("gpt_oss", hidden_size=64, intermediate_size=64, num_hidden_layers=2)
    tensors = load_file(source / "model.safetensors")
    stored, wide = {}, dict(tensors)
    for name, tensor in tensors.items():
        parent, _, last = name.rpartition(".")
        if not parent.endswith(".experts"):
            stored[name] = tensor
            continue
        parts = ("gate_proj", "up_proj") if last.startswith("gate_up") else ("down_proj",)
        if last.endswith("_bias"):
            for expert, bias in enumerate(tensor):
                for i, part in enumerate(parts):
                    stored[f"{parent}.{expert}.{part}.bias"] = bias[i :: len(parts)].contiguous()
            continue
        wide[name] = tensor.clone()
        for expert in range(len(tensor)):
            for i, part in enumerate(parts):
                own = wide[name][expert][:, i :: len(parts)]
                packed, scales, meant = mxfp4(np.ascontiguousarray(own.T.numpy()))
                own.copy_(torch.from_numpy(meant).T)
                layer = f"{parent}.{expert}.{part}"
                stored[f"{layer}.weight"], stored[f"{layer}.weight_scale"] = packed, scales
                stored[f"{layer}.input_scale"] = torch.tensor(7.0)
    config = CONFIG | {
        "global_quant_config": scheme(QUARK, FP8),
        "exclude": ["lm_head", "*self_attn*", "re:.*router"],
    }
    folder = write(source, tmp_path / "quark", stored, quantization_config=config)
    expected = reference_logprobs(write(source, tmp_path / "wide", wide))
    assert (logprobs(folder) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("is_static", [False, True])
def test_layers_by_name_have_their_own_scheme(checkpoint, tmp_path, is_static):
    """MXFP4 experts beside attention in FP8 by rows, or by tensors with inputs that are scaled."""
    source = checkpoint("deepseek_v3", hidden_size=64, moe_intermediate_size=64, v_head_dim=16)

    def fp8_tensor(weight):
        scale = np.float32(np.abs(weight).max() / 448)
        return fp8(weight, scale, scale, input_scale=torch.tensor(0.05))

    def build_of(name):
        if ".experts." in name and "self_attn" not in name:
            return plain_mxfp4
        is_own = "self_attn" in name and "_proj" in name
        return (fp8_tensor if is_static else fp8_rows) if is_own else None

    named = scheme(FP8, FP8) if is_static else scheme(ROWS, TOKENS)
    config = CONFIG | {
        "global_quant_config": scheme(QUARK, QUARK | {"is_dynamic": True}),
        "layer_quant_config": {"*self_attn*": named, "model.layers.61*": named},
        "exclude": ["lm_head", "re:.*shared_experts.*", "*.mlp.gate", "re:model.layers.0.mlp.*"],
    }
    target = tmp_path / "quark"
    target.mkdir()
    wanted = store_each(source, target, build_of, config)
    expected = reference(
        source, load_file(source / "model.safetensors") | wanted, tmp_path / "wide"
    )
    assert (logprobs_of_mla(target) - expected).abs().max() < 1e-4


def test_outputs_of_k_and_v_are_scales_of_the_cache(checkpoint, tmp_path):
    source = checkpoint("qwen3", **SHAPE)
    tensors = load_file(source / "model.safetensors")
    for layer in range(SHAPE["num_hidden_layers"]):
        for part in "qkv":
            tensors[f"model.layers.{layer}.self_attn.{part}_proj.output_scale"] = torch.tensor(0.05)
    cached = scheme(QUARK, None, FP8)
    config = CONFIG | {
        "layer_quant_config": {"*k_proj": cached, "*v_proj": cached},
        "export": CONFIG["export"] | {"kv_cache_group": ["*k_proj", "*v_proj"]},
        "exclude": ["*_proj", "lm_head"],
    }
    plain = {name: t for name, t in tensors.items() if not name.endswith("output_scale")}
    folder = write(source, tmp_path / "quark", tensors, quantization_config=config)
    scaled = logprobs(folder, kv_cache_dtype="fp8")
    unscaled = logprobs(write(source, tmp_path / "plain", plain), kv_cache_dtype="fp8")
    assert torch.equal(logprobs(folder), logprobs(source))
    assert 0 < (scaled - unscaled).abs().max() < 1
