"""Mixtures of experts other than Qwen's: formats as published, skipped layers, bad input."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB
from transformers import AutoModelForCausalLM

from vllm import LLM, SamplingParams
from vllm.errors import CheckpointError
from vllm.model_executor.quantize import quantize_checkpoint
from vllm.utils.fp8 import per_block_cast_to_fp8

PROMPT = [(7 * i + 3) % VOCAB for i in range(50)]
# As published; expressions and last parts of names for lists of single layers.
CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head", "re:.*\\.mlp\\.gate$", "re:model\\.layers\\.3\\.eh_proj"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
            "input_activations": {
                "num_bits": 8, "type": "float", "strategy": "token", "dynamic": True,
                "symmetric": True,
            },
        }
    },
}  # fmt: skip
BLOCK = {
    "quant_method": "fp8",
    "fmt": "float8_e4m3fn",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
}


def load(folder, **options) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, max_num_seqs=4, **options)


def logprobs(llm: LLM) -> torch.Tensor:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=VOCAB)
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    return torch.tensor([[e[i].logprob for i in range(VOCAB)] for e in output.prompt_logprobs[1:]])


@torch.inference_mode()
def reference_logprobs(folder) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return torch.log_softmax(model(torch.tensor([PROMPT])).logits[0, :-1], -1)


def write(source, target, tensors: dict[str, torch.Tensor], **changes):
    """A checkpoint of `tensors` with the config of `source`, changed."""
    target.mkdir(exist_ok=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    return target


def quantised(source, folder, quantization, block):
    """(FP8 checkpoint, checkpoint of the weights it stands for). block: None for a row."""
    suffix = "_scale_inv" if block else "_scale"
    tensors = load_file(source / "model.safetensors")
    stored, wide = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if re.search(r"(_proj|_qkvz|\.w[123])\.weight$", name):
            own = block or (1, weight.shape[1])
            q, scales = per_block_cast_to_fp8(weight, own)
            stored[name], stored[name + suffix] = q, scales
            rows, columns = (torch.arange(n) // size for n, size in zip(weight.shape, own))
            wide[name] = q.float() * scales[rows][:, columns]
    return (
        write(source, folder / "fp8", stored, quantization_config=quantization),
        write(source, folder / "wide", wide),
    )


# Blocks of 128 end inside of weights, and inside the gate rows where up rows follow.
UNEVEN = {"hidden_size": 180, "intermediate_size": 152}
STORED = {
    "glm4_moe-normed": (CHANNEL, None, UNEVEN | {"moe_intermediate_size": 136}),
    "minimax_m2": (BLOCK, (128, 128), UNEVEN),
    "mixtral": (BLOCK, (128, 128), UNEVEN),
    "qwen3_next": (
        BLOCK | {"modules_to_not_convert": ["gate", "shared_expert_gate", "lm_head", "in_proj_ba"]},
        (128, 128),
        UNEVEN | {"moe_intermediate_size": 136},
    ),
}


@pytest.mark.parametrize("name", STORED)
def test_fp8_checkpoints_match_the_weights_they_stand_for(checkpoint, tmp_path, name):
    quantization, block, sizes = STORED[name]
    source = checkpoint(name, **sizes)
    stored, wide = quantised(source, tmp_path, quantization, block)
    wanted = reference_logprobs(wide)
    llm = load(stored)
    formats = {str(d.problem.weight) for _, d in llm.llm_engine.core.selection.records
               if d.problem.family == "moe"}  # fmt: skip
    assert formats == {"fp8-block[128x128]" if block else "fp8-channel"}
    assert (logprobs(llm) - wanted).abs().max() < 1e-4
    assert (reference_logprobs(source) - wanted).abs().max() > 1e-2


@pytest.mark.parametrize("name", STORED)
def test_quantising_at_load_equals_quantising_before_and_keeps_the_router(
    checkpoint, tmp_path, name
):
    quantization, block, sizes = STORED[name]
    source = checkpoint(name, **sizes)
    stored, _ = quantised(source, tmp_path, quantization if block else BLOCK, (128, 128))
    llm = load(source, quantization="fp8")
    kinds = {layer.rpartition(".")[2]: str(d.problem.weight)
             for layer, d in llm.llm_engine.core.selection.records
             if d.problem.family in ("moe", "linear")}  # fmt: skip
    assert (kinds["gate"], kinds["experts"]) == ("fp32", "fp8-block[128x128]")
    assert torch.equal(logprobs(llm), logprobs(load(stored)))
    quantize_checkpoint(source, tmp_path / "disk", "fp8-block")
    assert torch.equal(logprobs(llm), logprobs(load(tmp_path / "disk")))


# ---------------------------------------------------------------- layers that are skipped


def test_layers_of_multi_token_prediction_are_skipped_by_their_number(checkpoint, tmp_path):
    source = checkpoint("glm4_moe")
    tensors = load_file(source / "model.safetensors")
    extra = {
        name.replace("layers.2.", "layers.3."): tensor.clone()
        for name, tensor in tensors.items()
        if ".layers.2." in name
    }
    extra["model.layers.3.eh_proj.weight"] = torch.zeros(48, 96)
    folder = write(source, tmp_path / "mtp", tensors | extra)
    assert torch.equal(logprobs(load(folder)), logprobs(load(source)))


def test_layers_of_multi_token_prediction_are_skipped_by_their_name(checkpoint, tmp_path):
    source = checkpoint("qwen3_next")
    tensors = load_file(source / "model.safetensors") | {"mtp.fc.weight": torch.zeros(48, 96)}
    folder = write(source, tmp_path / "mtp", tensors)
    assert torch.equal(logprobs(load(folder)), logprobs(load(source)))


def test_layers_beyond_the_last_are_unknown_where_a_family_has_none(checkpoint, tmp_path):
    source = checkpoint("qwen3_moe")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(48, 96)
    with pytest.raises(CheckpointError, match=r"unknown to this model: model\.layers\.3\.eh_proj"):
        load(write(source, tmp_path / "more", tensors))


# ---------------------------------------------------------------- checkpoints that are wrong

BIASES = {
    "glm4_moe": "model.layers.1.mlp.gate.e_score_correction_bias",
    "minimax_m2": "model.layers.1.block_sparse_moe.e_score_correction_bias",
    "hy_v3": "model.layers.1.mlp.expert_bias",
    "afmoe": "model.layers.1.mlp.expert_bias",
    "mimo_v2_flash": "model.layers.1.mlp.gate.e_score_correction_bias",
}


@pytest.mark.parametrize("name", BIASES)
def test_a_correction_bias_of_a_wrong_length_is_named_with_both(checkpoint, tmp_path, name):
    source, bias = checkpoint(name), BIASES[name]
    tensors = load_file(source / "model.safetensors")
    tensors[bias] = tensors[bias][..., :-1].clone()
    with pytest.raises(CheckpointError, match=r"_bias has shape \[.*7\].*\[.*8\]"):
        load(write(source, tmp_path / "short", tensors))
    del tensors[bias]
    with pytest.raises(CheckpointError, match=rf"lacks {bias}"):
        load(write(source, tmp_path / "none", tensors))


@pytest.mark.parametrize("name", BIASES)
def test_the_correction_bias_decides_which_experts_serve(checkpoint, tmp_path, name):
    source, bias = checkpoint(name), BIASES[name]
    tensors = load_file(source / "model.safetensors")
    tensors[bias] = -tensors[bias]
    other = load(write(source, tmp_path / "other", tensors))
    assert (logprobs(other) - logprobs(load(source))).abs().max() > 0.1


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        (
            "glm4_moe",
            {"num_experts_per_tok": 9},
            "num_experts_per_tok = 9 is more than n_routed_experts = 8",
        ),
        (
            "minimax_m2",
            {"num_experts_per_tok": 9},
            "num_experts_per_tok = 9 is more than num_local_experts = 8",
        ),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func = 'softmax'.*it takes 'sigmoid'"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type = 'per_head'.*'per_layer'"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1]}, "attn_type_list holds 0"),
        ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size = 64"),
        (
            "mixtral",
            {"num_experts_per_tok": 7},
            "num_experts_per_tok = 7 is more than num_local_experts = 6",
        ),
        ("mixtral", {"sliding_window": 0}, r"sliding_window = 0 is out of range \(1 to"),
        ("mistral", {"sliding_window": 0}, r"sliding_window = 0 is out of range \(1 to"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported"),
        (
            "qwen2_moe",
            {"shared_expert_intermediate_size": 0},
            "expert_intermediate_size = 0 is out",
        ),
        ("afmoe", {"n_group": 2}, "n_group = 2 is not supported: it takes 1"),
        (
            "afmoe",
            {"layer_types": ["linear_attention"] * 3},
            r"layer_types\[0\] = 'linear_attention': it takes sliding_attention or full",
        ),
        ("afmoe", {"sliding_window": 0}, r"sliding_window = 0 is out of range \(1 to"),
        ("gemma4-experts", {"top_k_experts": 7}, "top_k_experts = 7 is more than num_experts = 6"),
        ("mimo_v2_flash", {"v_head_dim": 32}, "v_head_dim = 32 is more than head_dim = 24"),
        ("mimo_v2_flash", {"swa_head_dim": 16}, "swa_head_dim = 16 is not supported: it takes 24"),
        ("mimo_v2_flash", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is more than n_rou"),
        ("hy_v3", {"route_norm": False}, "route_norm = False is not supported: it takes True"),
        ("hy_v3", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is more than num_experts ="),
        (
            "hy_v3",
            {"mlp_layer_types": ["dense", "sparse", "sparse", "linear"]},
            r"mlp_layer_types = .*'linear'\]: it takes dense or sparse",
        ),
        ("hy_v3", {"mlp_layer_types": ["dense"]}, r"mlp_layer_types = \['dense'\]: it takes"),
        ("hunyuan_v1_moe", {"moe_topk": 7}, "moe_topk = 7 is more than num_experts = 6"),
        ("hunyuan_v1_moe", {"moe_topk": [3, 3, 2]}, r"moe_topk = \[3, 3, 2\] is not supported: it"),
        ("hunyuan_v1_moe", {"moe_topk": [3]}, "3 layers"),
        ("hunyuan_v1_moe", {"use_cla": True}, "use_cla = True is not supported: it takes False"),
        ("hunyuan_v1_moe", {"moe_intermediate_size": 48}, "moe_intermediate_size = 48 is not supp"),
        ("dots1", {"sliding_window": 0}, r"sliding_window = 0 is out of range \(1 to"),
        ("dots1", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is more than n_routed_exp"),
        ("glm4_moe", {"n_group": 3}, "n_group = 3 groups of 8 experts"),
        ("glm4_moe", {"topk_group": 5}, "topk_group = 5 of n_group = 4"),
        ("glm4_moe", {"topk_group": 1}, "leave 2 of 8 experts to choose from"),
        ("glm4_moe", {"n_routed_experts": 0}, "n_routed_experts = 0 is out of range"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace = -1 is out of range"),
        ("glm4_moe", {"routed_scaling_factor": "2"}, "routed_scaling_factor"),
    ],
)
def test_a_field_that_makes_no_sense_is_named(checkpoint, tmp_path, name, changes, says):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(name), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=says):
        load(folder)
