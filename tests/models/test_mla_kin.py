"""Kimi K2.5, Mistral Small 4 and Mistral Large 3 in the layouts of their published checkpoints."""

import json
import math

import pytest
import torch
from checkpoint_layouts import LAYOUTS, args, ct_int4, fp8_tensor, groups_of, store
from safetensors.torch import load_file, save_file
from test_latent_attention import PROMPT, changed, logprobs
from tiny_models import build_model, save
from transformers import AutoModelForImageTextToText

from vllm import LLM
from vllm.config.model import ModelConfig
from vllm.errors import CheckpointError

# Whole groups of 32 and of 16 in the weights of experts.
SIZES = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


@torch.inference_mode()
def reference(folder, weights: dict[str, torch.Tensor], target) -> torch.Tensor:
    """Of the multimodal transformers model of `folder` in float32 with `weights` instead."""
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors") | weights
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForImageTextToText.from_pretrained(target, dtype=torch.float32).eval()
    return torch.log_softmax(model(torch.tensor([PROMPT])).logits[0, :-1], -1)


# ---------------------------------------------------------------- Kimi K2.5

NOT_QUANTISED = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
                 "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]  # fmt: skip
INT4 = groups_of("pack-quantized", args(4, "int", "group", group_size=32))
NVFP4 = LAYOUTS["modelopt-nvfp4"][1]
IN_WHOLE = ["language_model.lm_head", "language_model.model.layers.*.self_attn*",
            "language_model.model.layers.*.mlp.shared_experts*", "mm_projector*", "vision_tower*",
            "language_model.model.layers.0.mlp*"]  # fmt: skip


@pytest.mark.parametrize(
    ("build", "config", "is_nested"),
    [
        (ct_int4(32), INT4 | {"ignore": NOT_QUANTISED}, True),
        (LAYOUTS["modelopt-nvfp4"][0], NVFP4 | {"ignore": IN_WHOLE}, False),
    ],
)
def test_experts_of_kimi_k25_are_read_as_published(checkpoint, tmp_path, build, config, is_nested):
    """nested: the quantisation is said in text_config."""
    source, target = checkpoint("kimi_k25-multimodal", **SIZES), tmp_path / "quantised"
    target.mkdir()
    wanted = store(source, target, build, config, picks=lambda n: ".experts." in n)
    assert len(wanted) == 3 * 8
    file = target / "config.json"
    whole = json.loads(file.read_text()) | {"architectures": ["KimiK25ForConditionalGeneration"]}
    whole["auto_map"] = {"AutoConfig": "configuration_kimi_k25.KimiK25Config"}
    whole["text_config"] |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "x.Y"}}
    if is_nested:
        whole["text_config"]["quantization_config"] = whole.pop("quantization_config")
    file.write_text(json.dumps(whole))
    expected = reference(source, wanted, tmp_path / "wide")
    assert (logprobs(target) - expected).abs().max() < 1e-4
    assert (logprobs(source) - expected).abs().max() > 1e-2


# ---------------------------------------------------------------- Mistral Small 4


def test_stacks_of_fp8_experts_have_a_scale_for_each_expert(checkpoint, tmp_path):
    """As transformers stores Mistral Small 4: gate and up projection of an expert share it."""
    source = checkpoint("mistral4-multimodal", **SIZES)
    stored, wanted = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stored[name] = tensor
        if ".experts." in name:
            each = [fp8_tensor(expert.numpy()) for expert in tensor]
            stored[name] = torch.stack([tensors["weight"] for tensors, _ in each])
            scales = torch.stack([tensors["weight_scale"] for tensors, _ in each])
            stored[f"{name}_scale_inv"] = scales.view(-1, 1, 1)
            stored[f"{name}_activation_scale"] = torch.full((len(each),), 0.05)
            wanted[name] = torch.stack([torch.from_numpy(wide) for _, wide in each])
        elif "language_model" in name and "_proj" in name:
            tensors, wide = fp8_tensor(tensor.numpy())
            stored[name], stored[f"{name}_scale_inv"] = tensors["weight"], tensors["weight_scale"]
            stored[name.replace("weight", "activation_scale")] = torch.tensor(0.05)
            wanted[name] = torch.from_numpy(wide)
    assert sum(".experts." in name for name in wanted) == 2
    target = tmp_path / "fp8"
    target.mkdir()
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "weight_block_size": None,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    }
    (target / "config.json").write_text(json.dumps(config))
    expected = reference(source, wanted, tmp_path / "wide")
    assert (logprobs(target) - expected).abs().max() < 1e-4
    assert (logprobs(source) - expected).abs().max() > 1e-3


def test_an_override_keeps_yarn_from_scaling_scores(checkpoint):
    """As params.json of some models says it."""
    folder = checkpoint("mistral4-multimodal")
    override = {"text_config": {"rope_parameters": {"mscale_all_dim": 0, "attention_factor": 1.0}}}
    scales, factors = [], []
    for overrides in ({}, override):
        config = ModelConfig.load(str(folder), hf_overrides=overrides)
        assert config.decoder is not None
        scales.append(config.decoder.layers[0].mixer.attn.scale)
        factors.append(config.decoder.ropes[""].get("attention_factor"))
    temperature = 0.1 * math.log(4.0) + 1
    assert scales == pytest.approx([20**-0.5 * temperature**2, 20**-0.5])
    assert factors == [None, 1.0]


# ---------------------------------------------------------------- Mistral Large 3


def write_large(small, target) -> None:
    """Writes the text model of a Small 4 as a Large 3 whose YaRN leaves scores alone."""
    config = json.loads((small / "config.json").read_text())["text_config"]
    del config["rope_parameters"]
    config |= {
        "model_type": "mistral_large3",
        "architectures": ["MistralLarge3ForCausalLM"],
        "scoring_func": "softmax",
        "rope_theta": YARN["rope_theta"],
        "rope_scaling": YARN | {"apply_scale": False},
        "llama_4_scaling": {"beta": 0.3, "original_max_position_embeddings": 16},
        "vision_config": {"model_type": "x"},
        "tie_word_embeddings": True,
    }
    tensors = load_file(small / "model.safetensors")
    named = {
        name.replace("language_model.model.", "model.").replace("language_model.", ""): tensor
        for name, tensor in tensors.items()
        if "vision" not in name and "multi" not in name
    }
    named["vision_encoder.x.weight"] = torch.zeros(2, 2)  # fmt: skip
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    save_file(named, target / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """(folder of a Large 3, log-probabilities of the Small 4 that computes the same)."""
    folder = tmp_path_factory.mktemp("large")
    model = build_model(
        "mistral4-multimodal",
        **SIZES,
        rope_parameters=YARN | {"attention_factor": 1.0, "llama_4_scaling_beta": 0.3},
    )
    save(model, folder / "small")
    expected = reference(folder / "small", {}, folder / "wide")
    write_large(folder / "small", folder / "large")
    return folder / "large", expected


def test_large_3_is_small_4_whose_scores_yarn_leaves_alone(large):
    folder, expected = large
    assert (logprobs(folder) - expected).abs().max() < 1e-4


def test_large_3_scales_scores_and_queries_as_its_config_says(large, tmp_path):
    folder, expected = large
    for name, change in {
        "yarn": lambda c, _: c["rope_scaling"].update(apply_scale=True),
        "queries": lambda c, _: c.update(llama_4_scaling=None),
    }.items():
        changed(folder, tmp_path / name, change)
        assert (logprobs(tmp_path / name) - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"n_group": 2}, "n_group = 2 is not supported for this model"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' is not supported for this"),
        ({"llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling has no original_max"),
        ({"partial_rotary_factor": 0.9}, "rotates 18 of 20 columns of a head"),
    ],
)
def test_what_large_3_does_not_have_is_refused(large, tmp_path, change, text):
    changed(large[0], tmp_path / "bad", lambda c, _: c.update(change))
    with pytest.raises(CheckpointError, match=text):
        LLM(tmp_path / "bad", skip_tokenizer_init=True)


def test_a_folder_in_the_layout_of_mistral_is_refused_with_what_to_take(tmp_path):
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"consolidated.* not read; take a checkpoint"):
        LLM(tmp_path, skip_tokenizer_init=True)
