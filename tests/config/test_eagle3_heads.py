"""What configs of published EAGLE-3 heads mean, without their weights."""

import pytest

from vllm.architectures.eagle3 import ARCHITECTURE
from vllm.architectures.registry import builtin_config, describe
from vllm.config.eagle3 import head_of
from vllm.errors import CheckpointError, ConfigError

_LLAMA = {"model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu"}
# The fields that decide something, of yuhuili/EAGLE3-LLaMA3.1-Instruct-8B as speculators converts
# it, of RedHatAI/Qwen3-8B-Thinking-speculator.eagle3 as NeMo-RL reads it, and of gpt-oss-120B as
# SpecForge trains it.
HEADS = {
    "Llama-3.1-8B-NVFP4": {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": 32000,
        "norm_before_residual": False,
        "speculators_model_type": "eagle3",
        "target_hidden_size": None,
        "torch_dtype": "float32",
        "transformer_layer_config": _LLAMA
        | {
            "head_dim": 128, "hidden_size": 4096, "intermediate_size": 14336,
            "max_position_embeddings": 2048, "num_attention_heads": 32, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
            "vocab_size": 128256,
        },
    },
    "Qwen3-8B-FP8": _LLAMA
    | {
        "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000,
        "eagle_aux_hidden_state_layer_ids": [2, 18, 33], "norm_before_residual": True,
        "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288,
        "max_position_embeddings": 40960, "num_attention_heads": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000.0, "vocab_size": 151936,
        "sliding_window": None, "use_sliding_window": False, "max_window_layers": 36,
    },
    "gpt-oss-120b": _LLAMA
    | {
        "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 33]}, "pad_token_id": 0,
        "head_dim": 64, "hidden_size": 2880, "intermediate_size": 17280,
        "max_position_embeddings": 4096, "num_attention_heads": 64, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "vocab_size": 201088, "torch_dtype": "bfloat16",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layers", "norms_residual"),
    [
        ("Llama-3.1-8B-NVFP4", (2, 16, 29), False),
        ("Qwen3-8B-FP8", (2, 18, 33), True),
        ("gpt-oss-120b", (2, 18, 34), False),
    ],
)
def test_configs_of_published_heads(name, layers, norms_residual):
    model, given = describe(builtin_config(name)), HEADS[name]
    _, decoder, found = head_of(given, model, {}, "config.json")
    fields = given | given.get("transformer_layer_config", {})
    assert found == layers and decoder.norms_residual == norms_residual
    items = {prefix + item.name: item for prefix, item in decoder.items()}
    hidden = fields["hidden_size"]
    assert items["fc"].inputs.size == 3 * hidden == 3 * model.hidden_size
    assert items["layers.0.self_attn.qkv_proj"].inputs.size == 2 * hidden
    assert items["layers.0.mlp.down_proj"].inputs.size == fields["intermediate_size"]
    assert items["lm_head"].parts[0].num_rows == 32000 and not decoder.is_whole_vocab
    assert decoder.ropes[""]["rope_theta"] == 10000.0


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0.", "model.layers.0.", "model.midlayer."])
def test_layouts_of_names(prefix):
    assert ARCHITECTURE.slot_name(f"{prefix}mlp.up_proj.weight") == "layers.0.mlp.up_proj.weight"
    start = "model." * prefix.startswith("model.")
    for name in ("fc.weight", "embed_tokens.weight", "d2t", "norm.weight"):
        assert ARCHITECTURE.slot_name(start + name) == name
    for name in ("t2d", "verifier_lm_head.weight", f"{prefix}self_attn.rotary_emb.inv_freq"):
        assert ARCHITECTURE.slot_name(name) is None


WRONG = (None, True, -1, 0, 1.5, 1 << 60, float("nan"), "x", [], [1, "x"], [True], {}, {"x": 1})


@pytest.mark.parametrize("name", HEADS)
def test_no_value_of_a_field_ends_in_anything_but_a_head_or_our_own_error(name):
    model, given = describe(builtin_config(name)), HEADS[name]
    num_refused = 0
    nested = ("transformer_layer_config", "eagle_config")
    added = {"target_hidden_size", "norm_before_fc", "eagle_config", "rope_parameters"}
    for outer in ({}, *({one: given[one]} for one in nested if one in given)):
        (part, fields), *_ = [*outer.items(), ("", given)]
        for field in {*fields, *added}:
            for value in WRONG:
                changed = fields | {field: value}
                raw = given | {part: changed} if part else changed
                try:
                    head_of(raw, model, {}, "config.json")
                except (CheckpointError, ConfigError) as error:
                    assert "config.json" in str(error)
                    num_refused += 1
    assert num_refused > 100


def test_the_last_layer_of_all_may_be_read():
    """As nvidia/gpt-oss-120b-Eagle3-v3 does, whose fc reads what a norm gives."""
    model = describe(builtin_config("gpt-oss-120b"))
    config = HEADS["gpt-oss-120b"] | {"norm_before_fc": True, "draft_vocab_size": 201088}
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [24, 30, 36]}
    _, decoder, layers = head_of(config, model, {}, "config.json")
    assert layers == (24, 30, 36) and decoder.norms_inputs and decoder.is_whole_vocab
