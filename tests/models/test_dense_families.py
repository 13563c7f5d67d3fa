"""What dense families have besides Llama's: rotations by length, and what is wrong in a config."""

import json

import pytest
import torch
from test_against_transformers import as_inputs, load, prompts, reference
from tiny_models import VOCAB, build_model, one_thread

from vllm import SamplingParams
from vllm.architectures.registry import describe
from vllm.config.model import load_hf_config
from vllm.errors import CheckpointError, ConfigError

FACTORS = [1.0 + 0.5 * i for i in range(8)]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": FACTORS,
    "partial_rotary_factor": 1.0,
}
PARTIAL = LONGROPE | {"partial_rotary_factor": 0.75}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def logprobs(llm, tokens) -> torch.Tensor:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=VOCAB)
    entries = llm.generate(as_inputs([tokens]), params, use_tqdm=False)[0].prompt_logprobs
    return torch.tensor([[entry[i].logprob for i in range(VOCAB)] for entry in entries[1:]])


def error_of(folder, name, length, **options) -> float:
    """The largest difference to transformers in a log-probability of a prompt of that length."""
    tokens = prompts(4, lengths=(length,))[0]
    with torch.inference_mode(), one_thread():
        logits = reference(folder, name)(torch.tensor([tokens])).logits[0, :-1]
    wanted = torch.log_softmax(logits, -1)
    return float((logprobs(load(folder, **options), tokens) - wanted).abs().max())


def test_longrope_takes_its_long_factors_beyond_the_original_length(tmp_path):
    changes = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}
    build_model("phi3", **changes).save_pretrained(tmp_path)
    folder = tmp_path
    assert error_of(folder, "phi3", 60, max_model_len=64) < 1e-4
    assert error_of(folder, "phi3", 130) < 1e-4
    assert error_of(folder, "phi3", 60) > 1e-2, "keys have one rotation, by the longest request"


def test_dynamic_scaling_changes_nothing_within_the_length_of_the_model(tmp_path):
    model = build_model("llama", rope_parameters=DYNAMIC, max_position_embeddings=128)
    model.save_pretrained(tmp_path)
    assert error_of(tmp_path, "llama", 120) < 1e-4


def test_a_narrower_type_follows_gemma_closely(checkpoint):
    folder = checkpoint("gemma2")
    tokens = prompts(5, lengths=(70,))[0]
    wide = logprobs(load(folder), tokens)
    for dtype, tolerance in (("bfloat16", 0.4), ("float16", 0.05)):
        error = (logprobs(load(folder, dtype=dtype), tokens) - wide).abs().max()
        assert 0 < error < tolerance


@pytest.mark.parametrize("name", ["gemma2", "phi3", "granite"])
def test_weights_are_quantised_at_load_as_others_are(checkpoint, name):
    folder = checkpoint(name)
    tokens = prompts(6, lengths=(50,))[0]
    quantised, plain = (load(folder, quantization=how) for how in ("fp8", None))
    error = (logprobs(quantised, tokens) - logprobs(plain, tokens)).abs()
    assert 0 < error.mean() < 0.2


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 2.0,
    "original_max_position_embeddings": 64,
}


def config(checkpoint, name) -> dict:
    return json.loads((checkpoint(name) / "config.json").read_text())


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "phi3",
            {"rope_parameters": PARTIAL},
            "short_factor in .* has 8 factors: it takes 6, one",
        ),
        ("phi3", {"rope_parameters": LONGROPE | {"long_factor": "x"}}, "long_factor = x"),
        ("phi3", {"rope_parameters": LONGROPE | {"short_factor": [0.0] * 8}}, "short_factor = "),
        (
            "phi3",
            {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 1}},
            "original_max_position_embeddings = 1 in rope_parameters: under rope_type longrope it",
        ),
        ("llama", {"rope_parameters": YARN | {"rope_theta": 1}}, "rope_theta = 1 in .* above 1"),
        ("llama", {"rope_parameters": YARN | {"beta_fast": "x"}}, "beta_fast = 'x' in rope_para"),
        (
            "llama",
            {"rope_parameters": YARN | {"mscale": [1]}},
            r"mscale = \[1\] in rope_parameters",
        ),
        ("llama", {"rope_parameters": YARN | {"attention_factor": "1"}}, "attention_factor = '1'"),
        (
            "ministral3",
            {"rope_parameters": YARN | {"llama_4_scaling_beta": "x"}},
            "llama_4_scaling_beta = 'x' in rope_parameters: it takes a number from 0 on, or null",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 2}},
            "partial_rotary_factor = 2 in rope_parameters rotates 32 of 16 columns",
        ),
        (
            "hunyuan_v1_dense",
            {"rope_parameters": DYNAMIC | {"alpha": "50"}},
            "alpha = '50' in rope_parameters for heads of 16: it takes a number above 0",
        ),
        ("hunyuan_v1_dense", {"use_qk_norm": False}, "use_qk_norm = False is not supported"),
        ("gemma2", {"hidden_activation": "gelu_tahn"}, "hidden_activation = 'gelu_tahn' is not"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, r"attn_logit_softcapping = 0\.0: it takes"),
        ("gemma2", {"final_logit_softcapping": -30.0}, r"final_logit_softcapping = -30\.0: it"),
        ("gemma3", {"query_pre_attn_scalar": 0}, r"query_pre_attn_scalar = 0\.0: it takes"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention = true"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 3}, r"layer_types\[0\] = 'chunked_at"),
        (
            "gemma4",
            {"hidden_size_per_layer_input": 256},
            "hidden_size_per_layer_input = 256 is not",
        ),
        ("gemma4", {"num_kv_shared_layers": 1}, "num_kv_shared_layers = 1 is not supported"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "attention = 'all' is not supported"),
        ("gemma4", {"per_layer_config": {"0": {"head_dim": 8}}}, "of every full_attention layer"),
        ("gemma4", {"per_layer_config": {"2": 8}}, "per_layer_config = .*it takes head_dim and"),
        ("gemma4", {"layer_types": ["linear_attention"] * 3}, r"layer_types\[0\] = 'linear_att"),
        ("granite", {"residual_multiplier": 0}, r"residual_multiplier = 0\.0: it takes a number"),
        ("granite", {"logits_scaling": "8"}, "logits_scaling = '8': it takes a finite number"),
    ],
)
def test_a_field_that_makes_no_sense_is_named(checkpoint, name, changes, words):
    raw = config(checkpoint, name)
    with pytest.raises(CheckpointError, match=words):
        describe(raw | changes)


WINDOWED = ["qwen2-window", "olmo3", "smollm3-window", "exaone4", "gemma2", "gemma3",
            "phi3-window", "mistral-window", "mixtral-window", "qwen2_moe", "dots1", "afmoe",
            "gpt_oss", "gemma4", "mimo_v2_flash"]  # fmt: skip


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("window", [0, -1, 2.5])
def test_a_window_of_no_keys_is_named(checkpoint, name, window):
    with pytest.raises(CheckpointError, match=rf"sliding_window = {window} is out of range \(1 to"):
        describe(config(checkpoint, name) | {"sliding_window": window})


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma3", {"layer_types": None, "sliding_window_pattern": 0}),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": None}),
        ("gemma3", {"rope_parameters": [1]}),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": 0}),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}),
    ],
)
def test_a_field_that_nothing_derives_from_is_a_wrong_checkpoint(
    checkpoint, tmp_path, name, changes
):
    (tmp_path / "config.json").write_text(json.dumps(config(checkpoint, name) | changes))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_hf_config(tmp_path, trust_remote_code=False, overrides={})


def test_a_rotation_that_layers_do_not_share_is_not_overridden(checkpoint):
    with pytest.raises(ConfigError, match="each type of layers of model_type gemma3_text has its"):
        load(checkpoint("gemma3"), hf_overrides={"rope_theta": 5000.0})


def test_kernels_that_have_no_cap_of_scores_are_not_chosen_for_gemma(checkpoint):
    llm = load(checkpoint("gemma2"))
    decisions = [d for _, d in llm.llm_engine.core.selection.records]
    problems = [d.problem for d in decisions if d.problem.family == "attention"]
    assert {p.softcap for p in problems} == {4.0}
    assert {p.softmax_scale for p in problems} == {24**-0.5}
    assert {p.sliding_window for p in problems} == {0, 20}
