"""Nemotron-H: kept states, names and formats of published checkpoints, and wrong ones."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, one_thread
from transformers import AutoModelForCausalLM

from vllm import LLM, SamplingParams
from vllm.errors import CheckpointError, ConfigError
from vllm.utils.fp8 import FP8_MAX

PROMPT = [(7 * i + 3) % VOCAB for i in range(90)]
LATENT = "nemotron_h-latent"


def load(folder, **options) -> LLM:
    return LLM(folder, **{"skip_tokenizer_init": True, "max_num_seqs": 3} | options)


def logprobs(llm: LLM) -> torch.Tensor:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=VOCAB)
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    return torch.tensor([[e[i].logprob for i in range(VOCAB)] for e in output.prompt_logprobs[1:]])


@torch.inference_mode()
@one_thread()
def reference(folder) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return torch.log_softmax(model(torch.tensor([PROMPT]), use_cache=False).logits[0, :-1], -1)


def write(source: Path, target: Path, tensors=None, **changes) -> Path:
    """A copy of `source` with other tensors, and `changes` to its config; None removes a field."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text()) | changes
    config = {name: value for name, value in config.items() if value is not None}
    (target / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def quantised(source: Path, is_stored, folder: Path, **quantization) -> tuple[Path, Path]:
    """(checkpoint as ModelOpt writes FP8 with a scale for each weight, that of the weights it
    stands for). is_stored: of a weight's name."""
    stored, wide = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        stored[name] = wide[name] = weight
        if is_stored(name):
            scale = weight.abs().max() / FP8_MAX
            stored[name] = (weight / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale"], stored[name.replace("weight", "input_scale")] = (
                scale, torch.tensor(0.05)
            )  # fmt: skip
            wide[name] = stored[name].float() * scale
    config = {"quant_method": "modelopt", **quantization}
    return (
        write(source, folder / "stored", stored, quantization_config=config),
        write(source, folder / "wide", wide),
    )


def formats(llm: LLM) -> dict[str, str]:
    return {
        layer.removeprefix("model.layers."): str(decision.problem.weight)
        for layer, decision in llm.llm_engine.core.selection.records
        if decision.problem.family in ("linear", "moe")
    }


# ---------------------------------------------------------------- states


def test_states_that_are_kept_change_no_token(checkpoint):
    options = {"max_num_batched_tokens": 64, "max_model_len": 256}
    kept = load(checkpoint("nemotron_h-moe"), enable_prefix_caching=True, **options)
    plain = load(checkpoint("nemotron_h-moe"), **options)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    texts = [[*PROMPT, *tail] for tail in ([5, 6, 7], [8] * 40, [9])]
    inputs = [{"prompt_token_ids": text} for text in texts]
    wanted = [o.outputs[0].token_ids for o in plain.generate(inputs, params, use_tqdm=False)]
    num_cached = 0
    for _ in range(2):
        found = kept.generate(inputs, params, use_tqdm=False)
        assert [one.outputs[0].token_ids for one in found] == wanted
        num_cached += sum(one.num_cached_tokens for one in found)
    assert num_cached > 100


def test_activations_of_16_bits_follow_the_reference_closely(checkpoint):
    folder = checkpoint(
        "nemotron_h"
    )  # without experts, which another rounding may choose otherwise
    wanted = reference(folder)
    for dtype, tolerance in (("bfloat16", 0.25), ("float16", 0.03)):
        assert (logprobs(load(folder, dtype=dtype)) - wanted).abs().max() < tolerance


# ---------------------------------------------------------------- checkpoints


def test_the_letters_and_names_of_before_mean_the_same_layers(checkpoint, tmp_path):
    source = checkpoint("nemotron_h-moe")
    wanted = logprobs(load(source))
    for name, kinds in (
        ("letters", {"hybrid_override_pattern": "ME*E", "layers_block_type": None}),
        ("names", {"layers_block_type": ["mamba", "moe", "attention", "moe"]}),
    ):
        assert torch.equal(logprobs(load(write(source, tmp_path / name, **kinds))), wanted)


def test_layers_of_multi_token_prediction_are_skipped(checkpoint, tmp_path):
    source = checkpoint("nemotron_h")
    tensors = load_file(source / "model.safetensors")
    assert all(name.startswith(("backbone.", "lm_head.")) for name in tensors)
    more = {"mtp.layers.0.mixer.q_proj.weight": torch.zeros(3, 3)}
    llm = load(write(source, tmp_path / "mtp", tensors | more))
    assert torch.equal(logprobs(llm), logprobs(load(source)))


def test_fp8_of_modelopt_matches_the_weights_it_stands_for(checkpoint, tmp_path):
    plain = ("norm", "gate.weight", "conv1d", "embeddings", "norm_f", "lm_head")
    stored, wide = quantised(
        checkpoint(LATENT),
        lambda name: name.endswith(".weight") and not any(part in name for part in plain),
        tmp_path,
        quant_algo="FP8",
        ignore=["lm_head", "backbone.layers.*.mixer.gate", "backbone.layers.*.mixer.conv1d"],
    )
    llm = load(stored)
    found = formats(llm)
    assert {name for name, kind in found.items() if kind == "fp32"} == {
        "1.mixer.gate", "3.mixer.gate", "lm_head"
    }  # fmt: skip
    # Of several weights, each with its own scale.
    merged = {name for name, kind in found.items() if kind == "fp8-channel"}
    assert merged == {"1.mixer.experts", "2.mixer.qkv_proj", "3.mixer.experts"}
    assert set(found.values()) == {"fp32", "fp8-tensor", "fp8-channel"}
    assert (logprobs(llm) - reference(wide)).abs().max() < 1e-4


def test_mixed_precision_quantises_what_it_lists_and_no_more(checkpoint, tmp_path):
    listed = ["backbone.layers.*.mixer.in_proj", "backbone.layers.1.mixer.fc1_latent_proj",
              "backbone.layers.*.mixer.experts.*.up_proj",
              "backbone.layers.*.mixer.experts.*.down_proj"]  # fmt: skip
    ends = ("in_proj.weight", "layers.1.mixer.fc1_latent_proj.weight")
    stored, wide = quantised(
        checkpoint(LATENT),
        lambda name: name.endswith(ends) or ".experts." in name,
        tmp_path,
        quant_algo="MIXED_PRECISION",
        quantized_layers={name: {"quant_algo": "FP8"} for name in listed},
        ignore=["lm_head", "mtp*"],
    )
    llm = load(stored)
    assert {name for name, kind in formats(llm).items() if kind != "fp32"} == {
        "0.mixer.in_proj", "1.mixer.fc1_latent_proj", "1.mixer.experts", "3.mixer.experts"
    }  # fmt: skip
    assert (logprobs(llm) - reference(wide)).abs().max() < 1e-4


# ---------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mlp_hidden_act": "gelu"}, "mlp_hidden_act = 'gelu' is not supported: it takes relu2"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act = 'gelu' is not supported: it takes silu"),
        ({"n_groups": 3}, "mamba_num_heads = 4 is not a multiple of n_groups = 3"),
        ({"time_step_limit": [1.0, 0.5]}, "time_step_limit = .* the smaller one first"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is more than n_routed_experts = 8"),
        ({"ssm_state_size": 512}, r"ssm_state_size = 512 is out of range \(1 to 256\)"),
        ({"conv_kernel": 1}, r"conv_kernel = 1 is out of range \(2 to 8\)"),
    ],
)
def test_a_wrong_field_is_named_with_what_it_takes(checkpoint, tmp_path, changes, text):
    folder = write(checkpoint("nemotron_h-moe"), tmp_path / "wrong", **changes)
    with pytest.raises(CheckpointError, match=text):
        load(folder)


def test_a_kind_of_layer_that_is_not_known_is_named(checkpoint):
    from vllm.architectures.registry import describe

    config = json.loads((checkpoint("nemotron_h") / "config.json").read_text())
    pattern = {"layers_block_type": None, "hybrid_override_pattern": "MX*M-"}
    with pytest.raises(CheckpointError, match="hybrid_override_pattern holds 'X': it takes M"):
        describe(config | pattern)
    with pytest.raises(CheckpointError, match=r"is of 5 layers, but num_hidden_layers = 6"):
        describe(config | {"num_hidden_layers": 6})


@pytest.mark.parametrize("part", ["D", "conv1d.bias", "norm.weight", "A_log"])
def test_a_missing_weight_of_a_mamba2_layer_is_named(checkpoint, tmp_path, part):
    tensors = load_file(checkpoint("nemotron_h") / "model.safetensors")
    del tensors[f"backbone.layers.0.mixer.{part}"]
    folder = write(checkpoint("nemotron_h"), tmp_path / "less", tensors)
    with pytest.raises(CheckpointError, match=rf"lacks model\.layers\.0\.mixer\.{part}"):
        load(folder)


def test_groups_that_ranks_do_not_divide_are_refused(checkpoint):
    with pytest.raises(ConfigError, match="n_groups = 2 is not a multiple of tp = 4"):
        load(checkpoint("nemotron_h"), tensor_parallel_size=4)
