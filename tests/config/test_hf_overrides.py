"""--hf-overrides does what it says, or is refused: none is dropped or taken by half in silence."""

import json

import pytest

from vllm.config.model import ModelConfig, load_hf_config
from vllm.errors import CheckpointError, ConfigError

YARN = {"rope_type": "yarn", "factor": 2.0}


def written(folder, raw: dict):
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def config_of(folder, raw: dict, overrides: dict):
    return load_hf_config(written(folder, raw), trust_remote_code=False, overrides=overrides)


SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 96,
}
LLAMA = SMALL | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
QWEN2 = SMALL | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
HYBRID = SMALL | {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
WHOLE = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": SMALL | {"model_type": "qwen3_5_text", "dtype": "bfloat16"},
}
# However a config.json spells a theta of one million.
SPELLINGS = [
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    {"rope_theta": 1e6},
    {"rope_theta": 1e6, "rope_scaling": None},
]


@pytest.mark.parametrize("stored", SPELLINGS)
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_scaling_keeps_the_theta_of_the_checkpoint(tmp_path, stored, name):
    rope = config_of(tmp_path, LLAMA | stored, {name: YARN}).rope_parameters
    assert rope == YARN | {"rope_theta": 1e6, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize("stored", [*SPELLINGS, {}])
@pytest.mark.parametrize("given", [{"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5}}])
def test_theta_alone_is_taken(tmp_path, stored, given):
    assert config_of(tmp_path, LLAMA | stored, given).rope_parameters["rope_theta"] == 5e5


def test_another_type_of_rope_replaces_the_parameters_of_the_one_before(tmp_path):
    llama3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 512}  # fmt: skip
    given = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    rope = config_of(tmp_path, LLAMA | {"rope_parameters": llama3}, given).rope_parameters
    assert rope == {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    none = config_of(tmp_path, LLAMA | {"rope_parameters": llama3}, {"rope_scaling": None})
    assert none.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    same = config_of(tmp_path, LLAMA | {"rope_parameters": llama3}, {"rope_scaling": {"factor": 4}})
    assert same.rope_parameters == llama3 | {"factor": 4}


def test_nested_overrides_reach_the_text_model(tmp_path):
    given = {"text_config": {"vocab_size": 64, "rope_theta": 5e5}, "tie_word_embeddings": True}
    config = config_of(tmp_path, WHOLE, given)
    text = config.get_text_config()
    assert (text.vocab_size, text.rope_parameters["rope_theta"]) == (64, 5e5)
    assert text.rope_parameters["partial_rotary_factor"] == 0.25
    assert config.tie_word_embeddings is True and text.hidden_size == 64


def test_old_and_new_names_of_a_field_are_one(tmp_path):
    raw = LLAMA | {"dtype": "bfloat16"}
    assert config_of(tmp_path, raw, {"torch_dtype": "float16"}).dtype == "float16"
    experts = SMALL | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    given = {"num_local_experts": 16}
    assert config_of(tmp_path, experts | {"num_experts": 8}, given).num_experts == 16


def test_another_architecture_is_what_is_built(tmp_path):
    given = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    model = ModelConfig.load(str(written(tmp_path, LLAMA)), load_format="dummy", hf_overrides=given)
    assert model.architecture.model_type == model.model_type == "qwen3"
    assert model.decoder.layers[0].mixer.qk_norm == "rms"


@pytest.mark.parametrize(
    ("raw", "overrides", "says"),
    [
        (LLAMA, {"hidden_sise": 3}, r"hidden_sise has no effect .* did you mean hidden_size"),
        (LLAMA, {"sliding_window": 64}, "sliding_window has no effect on model_type llama"),
        (LLAMA, {"text_config": {"vocab_size": 64}}, "text_config has no effect"),
        (LLAMA, {"rope_scaling": {}}, "changes nothing"),
        (LLAMA, {"rope_scaling": YARN, "rope_parameters": YARN}, "give rope_parameters"),
        (LLAMA, {"rope_scaling": YARN | {"rope_theta": 1e4}, "rope_theta": 1e5}, "give one"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn"}}, "rope_type yarn needs factor"),
        (LLAMA, {"rope_scaling": YARN | {"low_freq_factor": 1.0}}, "low_freq_factor has no effect"),
        (LLAMA, {"rope_scaling": {"factor": 2.0}}, "factor has no effect with rope_type default"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarm"}}, "'yarm' is unknown.* did you mean yarn"),
        (LLAMA, {"rope_scaling": 2.0}, "takes a JSON object"),
        (LLAMA, {"architectures": ["Qwen3ForCausalLM"]}, "model_type is llama: override both"),
        (LLAMA, {"model_type": "qwen3"}, "is of model_type llama.*override both"),
        (QWEN2, {"sliding_window": 64}, "sliding_window = 64 has no effect: .* it is None"),
        (QWEN2, {"max_window_layers": 1}, "max_window_layers = 1 has no effect: .*no sliding"),
        (
            HYBRID | {"layer_types": ["full_attention"] * 2},
            {"full_attention_interval": 2},
            "override layer_types instead",
        ),
        (WHOLE, {"vocab_size": 64}, r'give {"text_config": {"vocab_size": ...}}'),
        (WHOLE, {"text_config": {"vocab_sise": 64}}, r"text_config\.vocab_sise .*mean vocab_size"),
        (WHOLE, {"text_config": 3}, "text_config = 3: it takes a JSON object"),
        (WHOLE, {"dtype": "float16"}, "belongs to the text model"),
    ],
)  # fmt: skip
def test_an_override_without_effect_or_understood_by_half_is_refused(
    tmp_path, raw, overrides, says
):
    with pytest.raises(ConfigError, match=f"--hf-overrides.*{says}"):
        config_of(tmp_path, raw, overrides)


@pytest.mark.parametrize(
    ("raw", "overrides", "says"),
    [
        (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers = 0 is out of range"),
        (LLAMA, {"num_key_value_heads": 3}, "not a multiple of num_key_value_heads = 3"),
        (LLAMA, {"hidden_size": "big"}, "hidden_size"),
        (LLAMA, {"rms_norm_eps": -1.0}, "rms_norm_eps = -1.0 is out of range"),
        (LLAMA, {"hidden_act": "tanh"}, "hidden_act = 'tanh' is not supported"),
        (LLAMA, {"rope_parameters": {"rope_theta": -1.0}}, "rope_theta = -1.0"),
        (WHOLE, {"text_config": {"num_hidden_layers": 0}}, "num_hidden_layers = 0"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_said_to_be_of_the_override(tmp_path, raw, overrides, says):
    ((name, inner),) = overrides.items()
    name = next(iter(inner)) if isinstance(inner, dict) else name
    with pytest.raises(ConfigError, match=rf"(?s)^--hf-overrides: .*{says}.*; give another {name}"):
        ModelConfig.load(str(written(tmp_path, raw)), load_format="dummy", hf_overrides=overrides)


def test_a_wrong_value_of_the_file_is_said_to_be_of_the_file(tmp_path):
    path = written(tmp_path, LLAMA | {"num_hidden_layers": 0})
    with pytest.raises(CheckpointError, match=r"config\.json.*num_hidden_layers = 0"):
        ModelConfig.load(str(path), load_format="dummy", hf_overrides={"vocab_size": 64})
