"""Experts of a layer in one tensor, transposed: the values that the same experts have one by one."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_against_transformers import as_inputs, load, prompts
from tiny_models import VOCAB

from vllm import SamplingParams
from vllm.errors import CheckpointError

QWEN = "qwen3_vl_moe-multimodal"


def write(source, target, tensors, **changes):
    target.mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    return target


def logprobs(llm) -> torch.Tensor:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=VOCAB)
    tokens = prompts(7, lengths=(50,))
    entries = llm.generate(as_inputs(tokens), params, use_tqdm=False)[0].prompt_logprobs
    return torch.tensor([[entry[i].logprob for i in range(VOCAB)] for entry in entries[1:]])


def is_stack(name: str) -> bool:
    return name.endswith((".experts.gate_up_proj", ".experts.down_proj"))


def one_by_one(tensors: dict) -> dict:
    """Of stacks whose experts are [outputs, inputs]."""
    found = {name: tensor for name, tensor in tensors.items() if not is_stack(name)}
    for name in filter(is_stack, tensors):
        parent, _, last = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        for expert, whole in enumerate(tensors[name]):
            for part, weight in zip(parts, whole.chunk(len(parts))):
                found[f"{parent}.{expert}.{part}.weight"] = weight
    return found


def test_transposed_stacks_are_told_by_the_sizes_of_the_two(checkpoint, tmp_path):
    source = checkpoint(QWEN)
    tensors = load_file(source / "model.safetensors")
    assert any(map(is_stack, tensors))
    turned = {n: t.transpose(1, 2) if is_stack(n) else t for n, t in tensors.items()}
    single = one_by_one(tensors)
    wanted = logprobs(load(write(source, tmp_path / "single", single)))
    assert torch.equal(logprobs(load(source)), wanted)
    assert torch.equal(logprobs(load(write(source, tmp_path / "turned", turned))), wanted)


def test_a_transposed_stack_of_which_a_part_is_missing_is_refused(checkpoint, tmp_path):
    source = checkpoint(QWEN)
    tensors = load_file(source / "model.safetensors")
    turned = {n: t.transpose(1, 2) if is_stack(n) else t for n, t in tensors.items()}
    name = next(name for name in tensors if name.endswith("down_proj") and is_stack(name))
    turned[name] = turned[name][:, :, :40]
    with pytest.raises(CheckpointError, match=r"experts\.0\.\w+_proj\.weight .*has shape"):
        load(write(source, tmp_path / "short", turned))


def test_fp8_experts_of_qwen3_vl_are_those_that_are_quantised_at_load(checkpoint, tmp_path):
    """As published: each expert by itself, with lists of layers under their names of checkpoints."""
    from vllm.utils.fp8 import per_block_cast_to_fp8

    source = checkpoint(QWEN, hidden_size=180, moe_intermediate_size=136, intermediate_size=152)
    tensors = one_by_one(load_file(source / "model.safetensors"))
    stored = dict(tensors)
    for name, weight in tensors.items():
        if name.endswith("_proj.weight") and ".language_model." in name:
            q, scales = per_block_cast_to_fp8(weight, (128, 128))
            stored[name], stored[f"{name}_scale_inv"] = q, scales
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [
            *("lm_head", "model.visual.merger.linear_fc1"),
            *(f"model.language_model.layers.{i}.mlp.gate" for i in range(1, 3)),
        ],
    }
    llm = load(write(source, tmp_path / "fp8", stored, quantization_config=quantization))
    formats = {
        str(d.problem.weight)
        for _, d in llm.llm_engine.core.selection.records
        if d.problem.family == "moe"
    }
    assert formats == {"fp8-block[128x128]"}
    assert torch.equal(logprobs(llm), logprobs(load(source, quantization="fp8")))
