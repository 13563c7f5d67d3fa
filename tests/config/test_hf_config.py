"""config.json means to us what it means to transformers; what we would not read alike it reads."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
from tiny_models import ARCHITECTURES
from transformers import CONFIG_MAPPING, AutoConfig

from vllm.architectures.architecture import Architecture, Composite
from vllm.architectures.registry import known
from vllm.config.hf_config import HFConfig, read_config
from vllm.config.model import load_hf_config

CONFIGS = Path(__file__).parents[1] / "select" / "configs"
# What transformers' config classes have for training, labels, its own generation and multi-token
# prediction.
NOT_OURS = {
    "attention_dropout", "chunk_size_feed_forward", "id2label", "initializer_range",
    "embd_pdrop", "is_encoder_decoder", "label2id", "num_mtp_layers", "output_hidden_states",
    "output_router_logits", "pretraining_tp", "problem_type", "resid_pdrop", "residual_dropout",
    "return_dict", "router_aux_loss_coef", "router_jitter_noise", "transformers_version",
    "use_cache",
}  # fmt: skip
# The default sizes of these have heads that do not divide hidden_size.
NEEDED = {"glm4_moe": {"head_dim": 128}}
# What transformers derives for code that it shares with models without latents.
DERIVED = {"deepseek_v2": {"head_dim"}}
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# As published, with fields that transformers renames, derives or takes from elsewhere.
PUBLISHED: dict[str, dict] = {
    "qwen3-8b-fp8": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "bos_token_id": 151643,
        "eos_token_id": 151645, "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288,
        "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
        "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    "rope_scaling of before": {
        "model_type": "llama", "rope_theta": 5e5,
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192},
    },
    "type for rope_type": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2}},
    "yarn without an original length": {"model_type": "qwen2", "rope_parameters": dict(YARN)},
    "no rope_parameters": {"model_type": "ministral3", "max_position_embeddings": 65536},
    "null heads": {"model_type": "qwen2", "num_key_value_heads": None},
    "null head_dim": {"model_type": "llama", "head_dim": None, "hidden_size": 512},
    "null head_dim of mistral": {"model_type": "mistral", "head_dim": None},
    "sliding layers": {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 3},
    "experts under the new name": {"model_type": "qwen3_moe", "num_local_experts": 60},
    "mixtral of before": {"model_type": "mixtral", "rope_theta": 1e6, "num_local_experts": 4},
    "windows of qwen2_moe": {
        "model_type": "qwen2_moe", "use_sliding_window": True, "max_window_layers": 5,
        "sliding_window": 1024,
    },
    "several ends": {"model_type": "llama", "eos_token_id": [1, 2, 3], "dtype": "float16"},
    "fields of other types": {
        "model_type": "mistral", "use_sliding_window": False, "linear_num_key_heads": 2,
        "mlp_only_layers": None, "max_window_layers": 1,
    },
    "a head_dim that qwen2 has not": {"model_type": "qwen2", "head_dim": None},
    "hybrid interval": {"model_type": "qwen3_5_text", "full_attention_interval": 2},
    "hybrid rotation": {"model_type": "qwen3_5_moe_text", "partial_rotary_factor": 0.5},
    "text of mistral": {"model_type": "mistral3", "text_config": {"head_dim": 64}},
    "text of ministral": {"model_type": "mistral3", "text_config": {"model_type": "ministral3"}},
    "text of a type": {
        "model_type": "qwen3_5", "torch_dtype": "bfloat16", "tie_word_embeddings": True,
        "text_config": {"model_type": "qwen3_5_text", "dtype": "bfloat16"},
    },
    "dynamic": {"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "phi-4-mini": {
        "model_type": "phi3", "max_position_embeddings": 131072, "num_attention_heads": 24,
        "num_key_value_heads": 8, "original_max_position_embeddings": 4096, "rope_theta": 1e4,
        "partial_rotary_factor": 0.75, "sliding_window": 262144, "tie_word_embeddings": True,
        "rope_scaling": {
            "type": "longrope", "short_factor": [1.0] * 48, "long_factor": [*range(1, 49)],
        },
    },
    "gemma-2-2b": {"model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "rope_theta": 1e4},
    "gemma-3-1b": {
        "model_type": "gemma3_text", "rope_theta": 1000000, "rope_local_base_freq": 10000,
        "rope_scaling": None, "sliding_window": 512, "sliding_window_pattern": 6,
    },
    "gemma-3-4b": {
        "model_type": "gemma3", "torch_dtype": "bfloat16",
        "text_config": {
            "hidden_size": 2560, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
    },
    "glm-4.6-fp8": json.loads((CONFIGS / "GLM-4.6-FP8.json").read_text()),
    "minimax-m2": json.loads((CONFIGS / "MiniMax-M2.json").read_text()),
    "llama-4-scout": json.loads(
        (CONFIGS / "Llama-4-Scout-17B-16E-Instruct-FP8-dynamic.json").read_text()
    ),
    "llama-4-maverick": {
        "model_type": "llama4_text", "num_hidden_layers": 6, "interleave_moe_layer_step": 2,
        "num_local_experts": 128, "use_qk_norm": False, "rope_scaling": None,
    },
    "chunks of llama 4": {
        "model_type": "llama4_text", "num_hidden_layers": 4, "attention_chunk_size": None,
    },
    "qwen3-vl-30b": {
        "model_type": "qwen3_vl_moe", "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_vl_moe_text", "head_dim": 128, "dtype": "bfloat16",
            "num_experts": 128, "mlp_only_layers": [], "rope_theta": 5000000,
            "rope_scaling": {
                "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default",
            },
        },
    },
    "text with experts": {"model_type": "qwen3_5_moe", "text_config": {"num_experts": 16}},
}  # fmt: skip


def of_transformers(raw: dict):
    rest = json.loads(json.dumps({key: raw[key] for key in raw if key != "model_type"}))
    return CONFIG_MAPPING[raw["model_type"]](**rest)


def assert_equal(ours: HFConfig | None, theirs) -> None:
    """Of every field that either has."""
    assert ours is not None
    for name, value in vars(ours).items():
        if isinstance(value, HFConfig):
            assert_equal(value, getattr(theirs, name))
        elif name in ("dtype", "torch_dtype"):
            assert str(value) == str(getattr(theirs, name)).removeprefix("torch.")
        elif name == "head_dim" and theirs.head_dim is None:  # derived where it is used
            assert value in (None, theirs.hidden_size // theirs.num_attention_heads)
        elif not name.startswith(("vision", "transformers_version")):
            assert value == getattr(theirs, name), name
    absent = {field.name for field in fields(theirs)} - vars(ours).keys() - NOT_OURS
    absent -= DERIVED.get(theirs.model_type, set())
    assert not (absent if theirs.get_text_config() is theirs else set())


def is_read_here(one: Architecture | Composite) -> bool:
    if isinstance(one, Composite):
        return is_read_here(known()[one.text_types[0]])
    return one.is_served and one.is_in_transformers and not one.is_read_by_transformers


SERVED = [name for name, one in known().items() if is_read_here(one)]
READ_BY_TRANSFORMERS = {name for name in known() if name not in SERVED}


@pytest.mark.parametrize("model_type", SERVED)
def test_what_a_config_leaves_out_is_what_transformers_assumes(model_type):
    is_composite = isinstance(known()[model_type], Composite)
    raw = {"model_type": model_type} | ({"text_config": {}} if is_composite else {})
    raw |= NEEDED.get(model_type, {})
    assert_equal(read_config(raw), of_transformers(raw))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_as_transformers_reads_them(name):
    raw = PUBLISHED[name]
    before = json.dumps(raw)
    assert_equal(read_config(raw), of_transformers(raw))
    assert json.dumps(raw) == before


def test_a_type_that_only_code_in_checkpoints_knows_is_read_here_without_running_it():
    kimi = json.loads((CONFIGS / "Kimi-K2-Instruct.json").read_text())
    kimi["auto_map"] = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    ours = read_config(kimi)
    assert ours is not None and ours.model_type == "kimi_k2"
    theirs = of_transformers(kimi | {"model_type": "deepseek_v3", "auto_map": None})
    for name in ("rope_parameters", "kv_lora_rank", "n_routed_experts", "norm_topk_prob"):
        assert getattr(ours, name) == getattr(theirs, name)


def test_a_multimodal_config_with_code_for_both_of_its_models_is_read_without_running_it():
    text = json.loads((CONFIGS / "Kimi-K2-Instruct.json").read_text())
    text["auto_map"] = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    whole = {"model_type": "kimi_k25", "auto_map": {"AutoConfig": "configuration_kimi_k25.X"}}
    ours = read_config(whole | {"text_config": text, "tie_word_embeddings": False})
    assert ours is not None and vars(ours.get_text_config()) == vars(read_config(text))
    assert not ours.tie_word_embeddings


@pytest.mark.parametrize(
    "name", [name for name, (kind, _) in ARCHITECTURES.items() if kind not in READ_BY_TRANSFORMERS]
)
def test_what_transformers_writes_is_read_alike(name, checkpoint):
    folder = checkpoint(name)
    ours = load_hf_config(folder, trust_remote_code=False, overrides={})
    assert isinstance(ours, HFConfig)
    assert_equal(ours, AutoConfig.from_pretrained(folder))
    assert ours.get_text_config().model_type == ours.to_dict().get("text_config", ours.to_dict())[
        "model_type"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gpt2"},
        {"model_type": "nemotron_h"},
        {"model_type": 7},
        {"auto_map": {"AutoConfig": "configuration_x.X"}},
        {"hidden_size": "4096"},
        {"hidden_size": None},
        {"hidden_size": True},
        {"rms_norm_eps": "1e-6"},
        {"num_attention_heads": 0},
        {"num_attention_heads": 7},
        {"num_hidden_layers": 10**9},
        {"tie_word_embeddings": 1},
        {"dtype": 16},
        {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 64}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": None}},
        {"rope_theta": 0},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        {"rope_parameters": [1]},
        {"layer_types": ["full_attention"] * 32},
        {"model_type": "qwen3", "layer_types": ["full_attention"]},
        {"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["attention"]},
        {"model_type": "qwen3_moe", "mlp_only_layers": ["0"]},
        {"model_type": "qwen3_moe", "num_experts": 8, "num_local_experts": 8},
        {"model_type": "qwen3_5", "text_config": None},
        {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3"}},
        {"model_type": "mistral3", "text_config": {"hidden_size": []}},
    ],
)
def test_what_is_unusual_is_left_to_transformers(changes):
    assert read_config({"model_type": "llama"}) is not None
    assert read_config({"model_type": "llama"} | changes) is None


def test_overrides_are_put_over_the_file_before_anything_is_derived(checkpoint):
    folder = checkpoint("qwen3_5-multimodal")
    overrides = {"tie_word_embeddings": False, "text_config": {"vocab_size": 64}}
    config = load_hf_config(folder, trust_remote_code=False, overrides=overrides)
    before = load_hf_config(folder, trust_remote_code=False, overrides={})
    assert (config.tie_word_embeddings, before.tie_word_embeddings) == (False, True)
    text, text_before = config.get_text_config(), before.get_text_config()
    assert vars(text) == vars(text_before) | {"vocab_size": 64}
