"""Experts in the formats of other tools, and as we write them: the logits of a float32 model."""

import json
from itertools import product

import numpy as np
import pytest
import torch
from checkpoint_layouts import LAYOUTS, is_expert, is_projection, modelopt_nvfp4, store
from safetensors.torch import load_file
from slow import quick
from test_other_formats import HALF_STEP, widened
from test_qwen3_moe import (
    EXPERTS,
    PROMPT,
    load,
    logprobs,
    prompt_logprobs,
    records,
    reference_logprobs,
    refused,
    write,
)

from vllm.architectures.registry import builtin_config
from vllm.errors import CheckpointError
from vllm.model_executor.checkpoint_formats import FORMATS
from vllm.model_executor.quantize import quantize_checkpoint

# Two groups of 128 in some weights, one in others.
SHAPE = {
    "hidden_size": 128,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 128,
    "num_attention_heads": 8,
    "num_experts": 5,
    "num_experts_per_tok": 2,
}
LAYERS = {"qwen3_moe": 2, "qwen3_5_moe": 4}
# What such checkpoints keep of Qwen3.5: all but the routed experts.
KEPT = ["lm_head", "*linear_attn*", "*self_attn*", "*shared_expert*", "*mlp.gate"]
IGNORED = {"modelopt": "ignore", "compressed-tensors": "ignore", "awq": "modules_to_not_convert",
           "gptq": "modules_to_not_convert", "quark": "exclude"}  # fmt: skip


@pytest.fixture(scope="module")
def source(checkpoint):
    return checkpoint("qwen3_moe", **SHAPE, num_hidden_layers=LAYERS["qwen3_moe"])


@pytest.fixture(scope="module")
def stored(checkpoint, tmp_path_factory):
    """stored(model, layout) -> (folder, checkpoint of the weights it stands for); made once."""
    made = {}

    def make(model, layout):
        if (model, layout) not in made:
            source = checkpoint(model, **SHAPE, num_hidden_layers=LAYERS[model])
            build, config = LAYOUTS[layout]
            picks = is_projection
            if model == "qwen3_5_moe":
                config, picks = config | {IGNORED[config["quant_method"]]: KEPT}, is_expert
            folder = tmp_path_factory.mktemp(layout)
            tensors = load_file(source / "model.safetensors")
            weights = store(source, folder, build, config, picks)
            assert any(is_expert(name) for name in weights)
            made[model, layout] = folder, write(source, folder / "wide", tensors | weights)
        return made[model, layout]

    return make


CASES = [*product(LAYERS, LAYOUTS, [None, "torch"])]
QUICK = {*product(["qwen3_moe"], LAYOUTS, [None])}
QUICK |= {*product(["qwen3_moe"], [*LAYOUTS][::4], ["torch"])}
QUICK |= {*product(["qwen3_5_moe"], ["modelopt-nvfp4", "ct-fp8-block", "gptq-128"], [None])}


@pytest.mark.parametrize("case", quick(CASES, QUICK), ids=lambda case: "-".join(map(str, case)))
def test_experts_give_the_logits_of_their_dequantised_weights(stored, case):
    model, layout, backend = case
    folder, wide = stored(model, layout)
    llm = load(folder, moe_backend=backend)
    found = {(d.problem.weight.is_quantized, d.chosen) for _, d in records(llm, "moe")}
    assert found == {(True, backend or "cpu")}
    assert (prompt_logprobs(llm, [PROMPT])[0] - reference_logprobs(wide)).abs().max() < 1e-4


@pytest.mark.slow
def test_quantising_experts_is_visible_in_these_tests(checkpoint, stored):
    source = checkpoint("qwen3_5_moe", **SHAPE, num_hidden_layers=4)
    for layout in LAYOUTS:
        wanted = reference_logprobs(stored("qwen3_5_moe", layout)[1])
        assert (wanted - reference_logprobs(source)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("layout", "scale"),
    [("modelopt-nvfp4", "weight_scale_2"), ("ct-nvfp4", "weight_global_scale")],
)
def test_every_expert_keeps_the_global_scales_of_its_weights(stored, layout, scale):
    tensors = load_file(stored("qwen3_moe", layout)[0] / "model.safetensors")
    found = [float(t) for name, t in tensors.items() if ".experts." in name and scale in name]
    assert len(found) == 2 * 5 * 3
    assert len(set(found)) == len(found), "or the tests above do not see it"


def test_the_layout_of_the_published_model_loads_inside_a_multimodal_checkpoint(
    checkpoint, tmp_path
):
    """As Qwen3.5-397B-A17B-NVFP4: routed experts alone are quantised, vision is skipped."""
    source = checkpoint("qwen3_5_moe-multimodal", **SHAPE)
    published = builtin_config("Qwen3.5-397B-A17B-NVFP4")["quantization_config"]
    (tmp_path / "model").mkdir()
    weights = store(source, tmp_path / "model", modelopt_nvfp4, published, is_expert)
    tensors = load_file(source / "model.safetensors")
    assert any("visual" in name for name in tensors) and len(weights) == 4 * 5 * 3
    wide = write(source, tmp_path / "wide", tensors | weights)
    assert (logprobs(tmp_path / "model") - logprobs(wide)).abs().max() < 1e-4
    assert (logprobs(source) - logprobs(wide)).abs().max() > 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_experts_of_every_format_give_finite_logits(stored, layout):
    folder, _ = stored("qwen3_moe", layout)
    assert bool(logprobs(folder, load_format="dummy").isfinite().all())


# ---------------------------------------------------------------- what we write


@pytest.mark.parametrize("format_name", HALF_STEP)
def test_experts_that_we_quantise_load_and_are_near_what_they_were(
    source, quantised, tmp_path, format_name
):
    folder = quantised(format_name)
    weights = widened(load_file(folder / "model.safetensors"))
    plain = load_file(source / "model.safetensors")
    assert set(weights) == set(filter(is_projection, plain))
    for name, weight in weights.items():
        error = (weight - plain[name]).abs().max()
        assert error <= HALF_STEP[format_name] * plain[name].abs().max() * 1.001
    wide = write(source, tmp_path / "wide", plain | weights)
    assert (logprobs(folder) - reference_logprobs(wide)).abs().max() < 1e-4


@pytest.mark.parametrize("format_name", FORMATS)
def test_routers_are_listed_as_not_quantised(quantised, format_name):
    config = json.loads((quantised(format_name) / "config.json").read_text())
    config = config["quantization_config"]
    listed = config.get("ignore") or config["modules_to_not_convert"]
    assert {"lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"} == set(listed)


@pytest.mark.parametrize("format_name", HALF_STEP)
def test_compressed_tensors_reads_the_experts_that_we_write(quantised, format_name):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    tensors = load_file(quantised(format_name) / "model.safetensors")
    config = json.loads((quantised(format_name) / "config.json").read_text())
    config = config["quantization_config"]
    scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    for name, weight in widened(tensors).items():
        base = name.removesuffix("weight")
        if ".experts." in name:
            own = {n.removeprefix(base): t for n, t in tensors.items() if n.startswith(base)}
            theirs = compressor.decompress(own, scheme)["weight"].float()
            assert (theirs - weight).abs().max() <= weight.abs().max() * 2**-8


# ---------------------------------------------------------------- checkpoints that are wrong


@pytest.mark.parametrize(
    ("layout", "part"),
    [
        ("modelopt-nvfp4", "weight_scale_2"),
        ("modelopt-nvfp4", "input_scale"),
        ("modelopt-fp8", "weight_scale"),
        ("ct-nvfp4", "weight_global_scale"),
        ("ct-fp8-channel", "weight_scale"),
        ("ct-int4-32-zeros", "weight_zero_point"),
        ("awq-128", "qzeros"),
    ],
)
def test_a_missing_scale_names_the_expert(stored, tmp_path, layout, part):
    folder, _ = stored("qwen3_moe", layout)
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{EXPERTS}.3.up_proj.{part}"]
    refused(write(folder, tmp_path, tensors), rf"lacks {EXPERTS}\.3\.up_proj\.{part}; of .*holds")


@pytest.mark.parametrize(
    ("layout", "part", "value", "says"),
    [
        ("modelopt-nvfp4", "weight_scale", np.nan, "must be finite and not negative; it holds nan"),
        ("modelopt-nvfp4", "weight_scale_2", 0.0, "must be finite and above zero; it holds 0"),
        ("modelopt-fp8", "weight_scale", -1.0, "must be finite and not negative; it holds -1"),
        ("ct-nvfp4", "weight_global_scale", np.inf, "must be finite and above zero; it holds inf"),
        ("ct-fp8-channel", "weight_scale", np.inf, "must be finite and not negative; it holds inf"),
        ("ct-int4-128", "weight_scale", np.nan, "must be finite and not negative; it holds nan"),
        ("awq-128", "scales", np.nan, "must be finite and not negative; it holds nan"),
    ],
)
def test_a_scale_that_cannot_be_names_the_expert(stored, tmp_path, layout, part, value, says):
    folder, _ = stored("qwen3_moe", layout)
    tensors = load_file(folder / "model.safetensors")
    name = f"{EXPERTS}.2.down_proj.{part}"
    wide = tensors[name].float()
    wide.view(-1)[-1] = value
    tensors[name] = wide.to(tensors[name].dtype)
    refused(write(folder, tmp_path, tensors), rf"{name}: scales {says}")


@pytest.mark.parametrize(
    ("layout", "part", "change", "says"),
    [
        ("modelopt-nvfp4", "weight", lambda t: t[:, :-1], r"shape \[256, 63\].*\[256, 64\]"),
        ("modelopt-nvfp4", "weight", lambda t: t.int(), "type I32, but uint8 is needed"),
        ("ct-nvfp4", "weight_scale", lambda t: t[:, :4], r"shape \[256, 4\].*\[256, 8\]"),
        ("ct-nvfp4", "weight_scale", lambda t: t.float(), "type F32, but float8_e4m3fn is"),
        ("ct-fp8-channel", "weight_scale", lambda t: t[0], r"shape \[1\].*\[256, 1\]"),
        ("ct-int4-128", "weight_packed", lambda t: t[1:], r"shape \[255, 16\].*\[256, 16\]"),
        ("ct-int4-32-zeros", "weight_zero_point", lambda t: t[1:], r"shape \[31, 4\].*\[32, 4\]"),
        ("ct-int4-32-zeros", "weight_zero_point", lambda t: t.to(torch.int8), "type I8, but int32"),
        ("awq-128", "qweight", lambda t: t.T, r"shape \[32, 128\].*\[128, 32\]"),
        ("awq-128", "qzeros", lambda t: t.repeat(1, 8), r"shape \[1, 256\].*\[1, 32\]"),
    ],
)
def test_a_wrong_shape_or_type_names_the_expert(stored, tmp_path, layout, part, change, says):
    folder, _ = stored("qwen3_moe", layout)
    tensors = load_file(folder / "model.safetensors")
    name = f"{EXPERTS}.1.up_proj.{part}"
    tensors[name] = change(tensors[name]).contiguous()
    refused(write(folder, tmp_path, tensors), rf"{name} (has|is of) {says}")


def test_zero_points_that_the_config_denies_name_the_expert(stored, tmp_path):
    folder, _ = stored("qwen3_moe", "ct-int4-128")
    tensors = load_file(folder / "model.safetensors")
    name = f"{EXPERTS}.4.up_proj.weight_zero_point"
    tensors[name] = torch.zeros(32, 1, dtype=torch.int32)
    refused(write(folder, tmp_path, tensors), rf"unknown to this model: {name}; of .* takes")


def test_an_expert_that_is_stored_both_ways_is_named(stored, tmp_path):
    folder, _ = stored("qwen3_moe", "ct-nvfp4")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{EXPERTS}.0.up_proj.weight"] = torch.zeros(256, 128)
    refused(write(folder, tmp_path, tensors), r"unknown to this model: .*experts\.0\.up_proj\.wei")


@pytest.mark.parametrize(
    ("layout", "size", "says"),
    [
        (
            "modelopt-nvfp4",
            136,
            r"experts\.0 \(down_proj\): 136 columns are not .* groups of 16",
        ),
        ("ct-int4-128", 192, r"experts\.0 \(down_proj\): 192 columns are not .* groups of 128"),
        ("awq-32", 132, r"experts\.0 \(gate_proj, up_proj\): 132 rows cannot be packed by 8"),
    ],
)
def test_experts_that_are_not_of_whole_groups_are_named(checkpoint, tmp_path, layout, size, says):
    source = checkpoint("qwen3_moe", **SHAPE | {"moe_intermediate_size": size})
    tensors = load_file(source / "model.safetensors")
    refused(write(source, tmp_path, tensors, quantization_config=LAYOUTS[layout][1]), says)


def test_a_weight_of_no_whole_groups_is_named_before_anything_is_written(checkpoint, tmp_path):
    source = checkpoint("qwen3_moe", **SHAPE | {"moe_intermediate_size": 136})
    with pytest.raises(CheckpointError, match=r"experts\.0\.down_proj\.weight has 136 columns"):
        quantize_checkpoint(source, tmp_path / "out", "nvfp4")
    assert not (tmp_path / "out").exists()
