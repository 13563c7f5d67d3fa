"""`vllm kernels explain` with the flags of `vllm serve` that say how a model is read.

That each means the same to both, tests/select/test_one_truth.py asks of random models.
"""

import json

import pytest

from vllm.entrypoints.cli.main import main

GPU = ("--device", "h100", "--libs", "all", "--json")
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.fixture
def explain(tmp_path, capsys):
    """explain(config.json, *words) -> (exit code, problems by layer, stderr)."""

    def explained(config: dict | str, *words: str) -> tuple[int, dict[str, dict], str]:
        model = config
        if not isinstance(config, str):
            (tmp_path / "config.json").write_text(json.dumps(config))
            model = str(tmp_path)
        code = main(["kernels", "explain", model, *GPU, *words])
        out, err = capsys.readouterr()
        decisions = json.loads(out)["decisions"] if out else []
        return code, {layer: d["problem"] for d in decisions for layer in d["layers"]}, err

    return explained


def overrides(**fields: object) -> tuple[str, str]:
    return "--hf-overrides", json.dumps(fields)


def test_a_checkpoint_in_bf16_is_explained_as_it_is_quantised_at_load(explain):
    stored = explain(LLAMA)[1]["model.layers.0.mlp.down_proj"]
    code, quantised, _ = explain(LLAMA, "--quantization", "fp8")
    assert code == 0
    assert (stored["weight"], quantised["model.layers.0.mlp.down_proj"]["weight"]) == (
        "bf16",
        "fp8-block[128x128]",
    )
    assert quantised["lm_head"]["weight"] == "bf16"


def test_fields_of_config_json_are_replaced_before_layers_are_made(explain):
    words = overrides(intermediate_size=1024, quantization_config=BLOCKS)
    problem = explain(LLAMA, *words)[1]["model.layers.0.mlp.down_proj"]
    assert (problem["n"], problem["k"]) == (256, 1024)
    assert problem["weight"] == "fp8-block[128x128]"


def test_an_object_over_an_object_replaces_what_it_names_alone(explain):
    config = LLAMA | {"quantization_config": BLOCKS}
    kept = overrides(quantization_config={"modules_to_not_convert": ["down_proj"]})
    problems = explain(config, *kept)[1]
    assert problems["model.layers.0.mlp.down_proj"]["weight"] == "bf16"
    assert problems["model.layers.0.mlp.gate_up_proj"]["weight"] == "fp8-block[128x128]"


@pytest.mark.parametrize("model", ["DeepSeek-V3.1", "unheard_of"])
def test_models_that_the_engine_does_not_serve_take_overrides_too(explain, model):
    config = LLAMA | {"model_type": model} if model == "unheard_of" else model
    _, problems, _ = explain(config, *overrides(num_hidden_layers=5))
    layers = {name.split(".")[2] for name in problems if name.startswith("model.layers.")}
    assert layers == set("01234")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (overrides(hidden_sise=3), "--hf-overrides hidden_sise has no effect"),
        (overrides(sliding_window=64), "sliding_window has no effect on model_type llama"),
        (overrides(model_type="qwen3"), "override both"),
        (overrides(quantization_config=3), "quantization_config = 3 is no JSON object"),
        (("--quantization", "fp9"), "--quantization 'fp9' is unknown: it takes"),
        (("--quantization", "modelopt"), "needs a checkpoint that is quantised so"),
    ],
)
def test_what_serve_refuses_is_refused_with_its_words(explain, words, says):
    code, problems, err = explain(LLAMA, *words)
    assert (code, problems) == (2, {}) and says in err


def test_a_method_that_contradicts_the_checkpoint_is_refused(explain):
    code, _, err = explain(LLAMA | {"quantization_config": BLOCKS}, "--quantization", "modelopt")
    assert code == 2 and "--quantization modelopt contradicts the checkpoint" in err


@pytest.mark.parametrize("words", [overrides(head_dim=64), ("--quantization", "fp8")])
def test_a_single_layer_takes_neither(capsys, words):
    assert main(["kernels", "explain", "--layer", "bf16:512x512", *words]) == 2
    assert "say how MODEL is read, not --layer" in capsys.readouterr().err
