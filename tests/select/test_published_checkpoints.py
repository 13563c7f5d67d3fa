"""The list of published checkpoints says what the engine and `explain` say of each config."""

import json
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest

from vllm.architectures.registry import builtin_config, builtin_names
from vllm.entrypoints.cli.kernels_explain import asked_model
from vllm.kernels.report import published
from vllm.kernels.report.published import Published
from vllm.machine import Device

LISTED = {one.name: one for one in published.checkpoints()}
CONFIGS = Path(__file__).parent / "configs"
# Configs at hand, by the name of their checkpoint on the hub.
READ = {hub_name: builtin_config(short) for short, hub_name in builtin_names().items()} | {
    name: json.loads((CONFIGS / f"{file.removesuffix('.json')}.json").read_text())
    for name, file in {
        "deepseek-ai/DeepSeek-V3.2": "DeepSeek-V3.2",
        "moonshotai/Kimi-K2-Instruct": "Kimi-K2-Instruct",
        "zai-org/GLM-4.6-FP8": "GLM-4.6-FP8",
        "nvidia/gemma-4-31B-it-NVFP4": "Gemma-4-31B-IT-NVFP4",
        "XiaomiMiMo/MiMo-V2-Flash": "MiMo-V2-Flash",
        "nvidia/Gemma-4-26B-A4B-NVFP4": "Gemma-4-26B-A4B-NVFP4",
        "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic":
            "Llama-4-Scout-17B-16E-Instruct-FP8-dynamic",
        "MiniMaxAI/MiniMax-M2": "MiniMax-M2",
        "mistralai/Mistral-Large-3-675B-Instruct-2512": "Mistral-Large-3-675B-Instruct-2512",
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4": "Nemotron-3-Super-120B-A12B-NVFP4",
        "Qwen/Qwen3-Next-80B-A3B-Instruct-FP8": "Qwen3-Next-80B-A3B-Instruct-FP8",
        "openai/gpt-oss-120b": "gpt-oss-120b",
    }.items()
}  # fmt: skip


def test_the_list_has_every_checkpoint_once_with_its_page():
    assert len(published.checkpoints()) == len(LISTED) == 112
    for one in LISTED.values():
        assert one.page.startswith("https://github.com/vllm-project/recipes/blob/main/models/")


def test_a_config_counts_as_read_where_it_is_at_hand():
    assert {one.name for one in LISTED.values() if one.is_read} == READ.keys() & LISTED.keys()


@pytest.mark.parametrize("name", sorted(READ.keys() & LISTED.keys()))
def test_a_listed_model_and_format_are_those_of_the_config_that_was_read(name):
    config, listed = READ[name], LISTED[name]
    assert config["model_type"] == listed.config["model_type"]
    assert config["architectures"] == listed.config["architectures"]
    inner = listed.config.get("text_config", {}).get("model_type")
    assert (config.get("text_config") or {}).get("model_type") == inner
    stored, assumed = config["quantization_config"], listed.config["quantization_config"]
    for field in ("quant_method", "quant_algo", "weight_block_size", "format"):
        assert stored.get(field) == assumed.get(field)


@pytest.mark.parametrize("name", sorted(READ.keys() & LISTED.keys()))
def test_the_answer_is_that_of_explain_for_the_whole_config(name, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(READ[name]))
    args = Namespace(dtype="bfloat16", tp=1, ep=1)
    asked = asked_model(str(file), args, Device.parse("sm_90"))
    assert asked.facts is not None and asked.problems
    assert (LISTED[name].status == published.SERVED) is asked.facts.is_served


def test_every_answer_is_one_of_three_and_says_what_is_lacking():
    found = Counter(one.status for one in LISTED.values())
    assert set(found) <= {*published.STATUSES} and found[published.SERVED]
    for one in LISTED.values():
        assert bool(one.lacks) is (one.status != published.SERVED)


def checkpoint(model_type: str, name: str, **quantisation) -> Published:
    config = {"model_type": model_type, "architectures": [name]}
    return Published("a", "", "", True, config | {"quantization_config": quantisation})


def test_what_is_lacking_is_told_apart():
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    assert checkpoint("qwen3", "Qwen3ForCausalLM", **fp8).status == published.SERVED
    unknown = checkpoint("nosuch", "NoSuchForCausalLM", **fp8)
    assert (unknown.status, unknown.lacks) == (published.EXPLAINED, ("architecture",))
    unread = checkpoint("qwen3", "Qwen3ForCausalLM", quant_method="nosuch")
    assert (unread.status, unread.lacks) == (published.NAMED, ("format",))
