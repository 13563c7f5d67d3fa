"""Experts of a layer in one tensor, transposed: as good as the same experts one by one."""

import json

import pytest
import torch
from checkpoint_layouts import LAYOUTS
from safetensors.torch import load_file, save_file
from test_against_transformers import as_inputs, load, prompts
from tiny_models import VOCAB

from vllm import SamplingParams
from vllm.errors import CheckpointError
from vllm.model_executor.quantize import quantize_checkpoint

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
    """As published: each expert by itself, and a list of layers by their names in checkpoints."""
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


# ---------------------------------------------------------------- Llama 4 as published

SIZES = {"hidden_size": 64, "intermediate_size": 48, "intermediate_size_mlp": 96}
# Layers that NVIDIA's and RedHatAI's checkpoints keep.
KEPT = {
    "modelopt": {
        "ignore": [
            *("language_model.lm_head", "vision_model*", "multi_modal_projector*"),
            *(f"language_model.model.layers.{i}.feed_forward.router" for i in range(3)),
            *(f"language_model.model.layers.{i}.self_attn*" for i in range(4)),
        ]
    },
    "compressed-tensors": {
        "ignore": [
            *("re:.*lm_head", "re:.*self_attn", "re:.*router"),
            *("re:.*vision_model.*", "re:.*multi_modal_projector.*"),
        ]
    },
}


def is_stored(name: str) -> bool:
    return name.endswith("_proj.weight") and ".feed_forward." in name


def llama4(checkpoint) -> tuple:
    """Folder, and tensors with stacks as transformers writes them, [experts, inputs, outputs]."""
    source = checkpoint("llama4-multimodal", **SIZES)
    return source, load_file(source / "model.safetensors")


def as_outputs_first(tensors: dict) -> dict:
    return {n: t.transpose(1, 2) if is_stack(n) else t for n, t in tensors.items()}


def as_modelopt(tensors: dict, build) -> tuple[dict, dict]:
    """The checkpoint with stacks that ModelOpt would write, and the same with each expert by
    itself. build: of a matrix; numbers are shared by a stack."""
    stacked, single = {}, {}
    for name, tensor in as_outputs_first(tensors).items():
        if is_stored(name):
            pieces = build(tensor.contiguous().numpy())[0]
            own = {name.removesuffix("weight") + part: piece for part, piece in pieces.items()}
        elif not is_stack(name):
            own = {name: tensor}
        else:
            pieces = build(tensor.flatten(0, 1).contiguous().numpy())[0]
            count = len(tensor)
            for part, piece in pieces.items():
                stored = f"{name}_{part}" if part != "weight" else name
                experts = piece.view(count, -1, *piece.shape[1:]) if piece.ndim else [piece] * count
                stacked[stored] = experts.transpose(1, 2) if piece.ndim else piece
                parent, _, last = name.rpartition(".")
                parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
                for expert, whole in enumerate(experts):
                    shares = whole.chunk(len(parts)) if piece.ndim else [whole] * len(parts)
                    for which, share in zip(parts, shares):
                        single[f"{parent}.{expert}.{which}.{part}"] = share.clone()
            continue
        stacked |= own
        single |= own
    return stacked, single


@pytest.mark.parametrize("layout", ["modelopt-fp8", "modelopt-nvfp4"])
def test_stacks_of_modelopt_are_the_experts_one_by_one(checkpoint, tmp_path, layout):
    source, tensors = llama4(checkpoint)
    build, config = LAYOUTS[layout]
    stacked, single = as_modelopt(tensors, build)
    assert sum(".experts." in name for name in stacked) == 3 * 2 * (3 if "fp8" in layout else 4)
    config = {"quantization_config": config | KEPT["modelopt"]}
    llm = load(write(source, tmp_path / "stacked", stacked, **config))
    problems = {
        layer: d.problem
        for layer, d in llm.llm_engine.core.selection.records
        if d.problem.family in ("moe", "linear")
    }
    assert problems["model.layers.0.feed_forward.experts"].weight.is_quantized
    assert problems["model.layers.0.feed_forward.shared_expert.down_proj"].weight.is_quantized
    assert not problems["model.layers.0.self_attn.o_proj"].weight.is_quantized
    assert not problems["model.layers.0.feed_forward.router"].weight.is_quantized
    wanted = logprobs(load(write(source, tmp_path / "single", single, **config)))
    found = logprobs(llm)
    assert torch.equal(found, wanted)
    error = (found - logprobs(load(source))).abs()
    assert 1e-4 < error.mean() < 0.5


@pytest.mark.parametrize("layout", ["ct-fp8-channel", "ct-nvfp4"])
def test_compressed_tensors_give_the_logits_of_the_dequantised_weights(
    checkpoint, tmp_path, layout
):
    source, tensors = llama4(checkpoint)
    build, config = LAYOUTS[layout]
    stored, wide = {}, {}
    for name, tensor in one_by_one(as_outputs_first(tensors)).items():
        if not is_stored(name):
            stored[name] = wide[name] = tensor
            continue
        pieces, weight = build(tensor.contiguous().numpy())
        stored |= {name.removesuffix("weight") + part: piece for part, piece in pieces.items()}
        wide[name] = torch.from_numpy(weight)
    config = {"quantization_config": config | KEPT["compressed-tensors"]}
    llm = load(write(source, tmp_path / "stored", stored, **config))
    wanted = logprobs(load(write(source, tmp_path / "wide", wide)))
    assert (logprobs(llm) - wanted).abs().max() < 1e-4


def test_scales_that_are_neither_one_nor_one_for_each_expert_are_refused(checkpoint, tmp_path):
    source, tensors = llama4(checkpoint)
    build, config = LAYOUTS["modelopt-fp8"]
    stacked, _ = as_modelopt(tensors, build)
    name = "language_model.model.layers.1.feed_forward.experts.down_proj_weight_scale"
    quantization = {"quantization_config": config | KEPT["modelopt"]}
    wanted = logprobs(load(write(source, tmp_path / "one", stacked, **quantization)))
    stacked[name] = stacked[name].expand(6)
    for_each = load(write(source, tmp_path / "each", stacked, **quantization))
    assert torch.equal(logprobs(for_each), wanted)
    stacked[name] = stacked[name][:4]
    with pytest.raises(
        CheckpointError,
        match=r"down_proj_weight_scale has shape \[4\]: it takes one",
    ):
        load(write(source, tmp_path / "four", stacked, **quantization))


@pytest.mark.parametrize("format_name", ["fp8-block", "nvfp4"])
def test_a_copy_that_is_quantised_on_disk_has_each_expert_by_itself(
    checkpoint, tmp_path, format_name
):
    source, tensors = llama4(checkpoint)
    single = write(source, tmp_path / "single", one_by_one(as_outputs_first(tensors)))
    for folder, copy in ((source, "copy"), (single, "copy of single")):
        quantize_checkpoint(folder, tmp_path / copy, format_name)
    names = load_file(tmp_path / "copy" / "model.safetensors").keys()
    assert not any(map(is_stack, names))
    llm = load(tmp_path / "copy")
    kinds = {
        layer: str(d.problem.weight)
        for layer, d in llm.llm_engine.core.selection.records
        if d.problem.family in ("moe", "linear")
    }
    assert kinds["model.layers.0.feed_forward.experts"].startswith(format_name)
    assert kinds["model.layers.0.feed_forward.router"] == "fp32"
    assert torch.equal(logprobs(llm), logprobs(load(tmp_path / "copy of single")))
