"""The built-in models are whole, and what their published configs say."""

import re

import pytest

from vllm.architectures.registry import builtin_config, builtin_names, text_config
from vllm.formats.readers.registry import resolve_quantization
from vllm.kernels.problems import layer_problems
from vllm.kernels.select.problem import (
    AttentionProblem,
    KVQuantProblem,
    LinearProblem,
    MoEProblem,
    WeightProblem,
)


def problems_of(config: dict, **ranks):
    quant = resolve_quantization(config["quantization_config"], None, "model")
    return layer_problems(config, quant, dtype="bf16", kv_format="fp8", **ranks)


@pytest.mark.parametrize("name", builtin_names())
def test_a_built_in_model_is_found_by_either_name_and_is_a_copy(name):
    config = builtin_config(builtin_names()[name].upper())
    assert config == builtin_config(name)
    config["model_type"] = "changed"
    assert config != builtin_config(name)


def test_other_names_are_not_built_in():
    assert builtin_config("no/such-model") is None


@pytest.mark.parametrize("name", builtin_names())
@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (8, 1), (8, 8)])
def test_built_in_models_can_be_listed_on_any_usual_number_of_ranks(name, ranks):
    config = builtin_config(name)
    tp, ep = ranks
    problems = problems_of(config, tp=tp, ep=ep)
    text = text_config(config)
    names = [layer for layer, p in problems if not isinstance(p, KVQuantProblem)]
    assert len(names) == len(set(names))
    layers = {m[1] for layer in names if (m := re.match(r"model\.layers\.(\d+)\.", layer))}
    assert layers == {str(i) for i in range(text["num_hidden_layers"])}
    per_layer = sum(isinstance(p, AttentionProblem) for _, p in problems)
    full = text["num_hidden_layers"] // text.get("full_attention_interval", 1)
    assert per_layer == full


# In 10^9. The upper bound is the size that the model's card gives, which counts embeddings, norms
# and vision too.
@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("Qwen3.5-35B-A3B-FP8", 33.5, 35.5),
        ("Qwen3.5-397B-A17B-NVFP4", 390, 397),
        ("Qwen3-8B-FP8", 7.0, 8.2),
        ("Qwen3-30B-A3B-FP8", 29.5, 30.5),
        ("Qwen3-235B-A22B-FP8", 232, 235.1),
        ("Devstral-Small-2-24B", 22.5, 24),
        ("Llama-3.1-8B-NVFP4", 7.0, 8.03),
        ("DeepSeek-V3.1", 668, 671),
        ("GLM-4.6-FP8", 350, 357),
        ("MiniMax-M2", 226, 230),
    ],
)
def test_the_weights_of_built_in_models_add_up_to_their_published_size(name, least, most):
    total = 0
    for _, problem in problems_of(builtin_config(name)):
        if isinstance(problem, LinearProblem):
            total += problem.n * problem.k
        elif isinstance(problem, MoEProblem):
            total += 3 * problem.num_experts * problem.hidden * problem.intermediate
    assert least < total / 1e9 < most


def formats_by_last_part(name: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for layer, problem in problems_of(builtin_config(name)):
        if isinstance(problem, WeightProblem):
            found.setdefault(layer.rpartition(".")[2], set()).add(str(problem.weight))
    return found


def test_qwen3_5_fp8_keeps_gates_and_small_projections_in_bf16():
    formats = formats_by_last_part("Qwen3.5-35B-A3B-FP8")
    plain = {"lm_head", "gate", "in_proj_ba"}
    assert {last for last, found in formats.items() if found == {"bf16"}} == plain
    assert set().union(*(f for last, f in formats.items() if last not in plain)) == {
        "fp8-block[128x128]"
    }


def test_qwen3_5_nvfp4_quantises_routed_experts_alone():
    formats = formats_by_last_part("Qwen3.5-397B-A17B-NVFP4")
    assert {last for last, found in formats.items() if found != {"bf16"}} == {"experts"}
    assert formats["experts"] == {"nvfp4"}
