"""Checkpoints in the formats of other tools: the logits of a float32 model with their weights."""

import json
import shutil
from itertools import product

import numpy as np
import pytest
import torch
from checkpoint_layouts import (
    E2M1,
    LAYOUTS,
    SHAPE,
    as_float,
    is_projection,
    store,
    store_each,
)
from safetensors.torch import load_file, save_file
from slow import quick
from test_fp8 import PROMPT, logprobs, reference_logprobs
from transformers import AutoModelForCausalLM

from vllm import LLM, SamplingParams
from vllm.architectures.registry import builtin_config
from vllm.entrypoints.cli.main import main
from vllm.errors import CheckpointError, ConfigError
from vllm.formats.registry import quantizable
from vllm.model_executor.checkpoint_formats import FORMATS
from vllm.model_executor.quantize import quantize_checkpoint


@pytest.fixture(scope="module")
def source(checkpoint):
    return checkpoint("llama", **SHAPE)


@pytest.fixture(scope="module")
def stored(source, tmp_path_factory):
    """stored(layout) -> (folder, float32 weights); written once."""
    made = {}

    def make(layout):
        if layout not in made:
            folder = tmp_path_factory.mktemp(layout)
            made[layout] = folder, store(source, folder, *LAYOUTS[layout])
        return made[layout]

    return make


# ---------------------------------------------------------------- what loads


CASES = [*product(LAYOUTS, [None, "torch"])]
QUICK = {*product(LAYOUTS, [None]), *product([*LAYOUTS][::4], ["torch"])}


@pytest.mark.parametrize("case", quick(CASES, QUICK), ids=lambda case: "-".join(map(str, case)))
def test_a_checkpoint_gives_the_logits_of_its_dequantised_weights(source, stored, case):
    layout, backend = case
    folder, weights = stored(layout)
    assert len(weights) == 2 * 7
    wanted = reference_logprobs(source, weights)
    assert (logprobs(folder, linear_backend=backend) - wanted).abs().max() < 1e-4
    plain = reference_logprobs(source, {})
    assert (wanted - plain).abs().max() > 1e-2, "quantisation must be visible for this to test it"


@pytest.mark.parametrize("layout", ["ct-int8", "ct-int8-static"])
def test_activations_in_int8_give_the_logits_of_a_model_that_rounds_them(source, stored, layout):
    folder, weights = stored(layout)

    def rounded(module, inputs):
        (x,) = inputs
        scale = 0.03 if layout.endswith("static") else x.abs().amax(-1, keepdim=True) / 127
        return ((x / scale).round().clamp(-128, 127) * scale,)

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    model.load_state_dict(weights, strict=False)
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(rounded)
    with torch.inference_mode():
        wanted = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0, :-1], -1)
    found = logprobs(folder, linear_backend="scaled_mm")
    assert (found - wanted).abs().mean() < 1e-3
    assert (logprobs(folder) - wanted).abs().mean() > 1e-2, "or activations are not rounded"


@pytest.mark.parametrize(
    ("layout", "scale"),
    [("modelopt-nvfp4", "weight_scale_2"), ("ct-nvfp4", "weight_global_scale")],
)
def test_shards_of_a_merged_layer_keep_their_own_global_scales(stored, layout, scale):
    tensors = load_file(stored(layout)[0] / "model.safetensors")
    scales = [tensors[f"model.layers.0.self_attn.{part}_proj.{scale}"] for part in "qkv"]
    assert len({float(value) for value in scales}) == 3, "or the test above does not see it"


@pytest.mark.parametrize("layout", ["ct-nvfp4a16", "awq-32"])
def test_a_merged_layer_with_biases_takes_them(checkpoint, tmp_path, layout):
    source = checkpoint("llama-tied-biased", **SHAPE)
    weights = store(source, tmp_path, *LAYOUTS[layout])
    assert (logprobs(tmp_path) - reference_logprobs(source, weights)).abs().max() < 1e-4


def test_a_tied_output_projection_is_that_of_the_embedding_even_where_it_is_not_ignored(
    checkpoint, tmp_path
):
    source = checkpoint("llama-tied-biased", **SHAPE)
    build, config = LAYOUTS["ct-nvfp4a16"]
    weights = store(source, tmp_path, build, config | {"ignore": []})
    assert (logprobs(tmp_path) - reference_logprobs(source, weights)).abs().max() < 1e-4


def test_an_output_projection_that_is_quantised_is_taken_so(source, tmp_path):
    build, config = LAYOUTS["ct-int4-128"]
    weights = store(source, tmp_path, build, config | {"ignore": []})
    tensors = load_file(tmp_path / "model.safetensors")
    pieces, head = build(tensors.pop("lm_head.weight").numpy())
    tensors |= {f"lm_head.{part}": piece for part, piece in pieces.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    weights["lm_head.weight"] = torch.from_numpy(head)
    assert (logprobs(tmp_path) - reference_logprobs(source, weights)).abs().max() < 1e-4


def test_groups_of_one_checkpoint_may_have_different_formats(source, tmp_path):
    by_layer = {"re:.*self_attn.*": "ct-fp8-channel", "model.layers.1.mlp.down_proj": "ct-int4-128"}
    config, groups = LAYOUTS["ct-nvfp4"][1], {}
    for index, (target, layout) in enumerate([("Linear", "ct-nvfp4"), *by_layer.items()]):
        chosen = LAYOUTS[layout][1]
        group = chosen["config_groups"]["group_0"] | {"targets": [target]}
        groups[f"group_{index}"] = group | {"format": chosen["format"]}
    config = config | {"format": "mixed-precision", "config_groups": groups}

    def build_of(name):
        layout = "ct-nvfp4"
        if "self_attn" in name:
            layout = "ct-fp8-channel"
        elif "layers.1.mlp.down_proj" in name:
            layout = "ct-int4-128"
        return LAYOUTS[layout][0] if is_projection(name) else None

    weights = store_each(source, tmp_path, build_of, config)
    assert (logprobs(tmp_path) - reference_logprobs(source, weights)).abs().max() < 1e-4


def test_excluded_modules_stay_as_they_are(source, tmp_path):
    build, config = LAYOUTS["modelopt-nvfp4"]
    weights = store(source, tmp_path, build, config | {"ignore": ["lm_head", "*.self_attn*"]})
    plain = load_file(source / "model.safetensors")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name: t for name, t in tensors.items() if "self_attn" not in name}
    tensors |= {name: t for name, t in plain.items() if "self_attn" in name}
    save_file(tensors, tmp_path / "model.safetensors")
    weights = {name: weight for name, weight in weights.items() if "self_attn" not in name}
    assert (logprobs(tmp_path) - reference_logprobs(source, weights)).abs().max() < 1e-4


def test_a_modelopt_checkpoint_may_say_so_beside_its_config(source, stored, tmp_path, capsys):
    folder, weights = stored("modelopt-nvfp4")
    shutil.copytree(folder, tmp_path / "model")
    shutil.copy(source / "config.json", tmp_path / "model")
    old = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    old["quantization"] |= {"group_size": 16, "exclude_modules": ["lm_head"]}
    (tmp_path / "model" / "hf_quant_config.json").write_text(json.dumps(old))
    wanted = reference_logprobs(source, weights)
    assert (logprobs(tmp_path / "model") - wanted).abs().max() < 1e-4
    main(["kernels", "explain", str(tmp_path / "model"), "--device", "cpu", "--libs", "none"])
    assert "linear nvfp4:" in capsys.readouterr().out


def test_modelopt_fp4_is_a_name_for_modelopt_checkpoints_in_nvfp4_alone(stored):
    folder, _ = stored("modelopt-nvfp4")
    assert torch.equal(logprobs(folder, quantization="modelopt_fp4"), logprobs(folder))
    with pytest.raises(CheckpointError, match="'FP8' is not supported by --quantization modelopt_"):
        logprobs(stored("modelopt-fp8")[0], quantization="modelopt_fp4")
    with pytest.raises(ConfigError, match="contradicts the checkpoint"):
        logprobs(stored("awq-128")[0], quantization="modelopt_fp4")


def test_calibrated_scales_of_the_cache_are_left_aside(stored, tmp_path):
    folder, _ = stored("modelopt-fp8")
    shutil.copytree(folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for part in ("k_proj.k_scale", "v_proj.v_scale"):
        tensors |= {f"model.layers.{i}.self_attn.{part}": torch.tensor(3.0) for i in (0, 1)}
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    assert torch.equal(logprobs(tmp_path / "model"), logprobs(folder))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_weights_of_every_format_give_finite_logits(stored, layout):
    assert bool(logprobs(stored(layout)[0], load_format="dummy").isfinite().all())


# ---------------------------------------------------------------- what we write


def test_the_built_in_nvfp4_model_runs_with_random_weights_from_its_config_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(builtin_config("Llama-3.1-8B-NVFP4")))
    small = {**SHAPE, "vocab_size": 512}
    llm = LLM(tmp_path, load_format="dummy", skip_tokenizer_init=True, hf_overrides=small,
              max_model_len=64, max_num_seqs=2)  # fmt: skip
    params = SamplingParams(max_tokens=5, ignore_eos=True, detokenize=False)
    (out,) = llm.generate([{"prompt_token_ids": [3, 4, 5]}], params, use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 5
    formats = {d.problem.format for _, d in llm.llm_engine.core.selection.records}
    assert {"nvfp4", "bf16"} <= formats


def test_the_cli_offers_the_formats_that_there_are():
    assert tuple(FORMATS) == tuple(quantizable())


def widened(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """float32 weights of a checkpoint of ours, from its tensors alone."""
    found = {}
    for name, tensor in tensors.items():
        base, _, part = name.rpartition(".")
        scale = tensors.get(f"{base}.weight_scale")
        if tensor.dtype in (torch.float8_e4m3fn, torch.int8) and part == "weight":
            if scale.dtype == torch.uint8:
                scale = torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
            found[name] = tensor.float() * scale
        elif tensor.dtype == torch.uint8 and part == "weight_packed":
            codes = np.stack([tensor.numpy() & 15, tensor.numpy() >> 4], -1).reshape(
                len(tensor), -1
            )
            wide = np.repeat(steps_of(tensors, base), codes.shape[1] // scale.shape[1], 1)
            found[f"{base}.weight"] = torch.from_numpy(E2M1[codes] * wide)
        elif tensor.dtype == torch.int32:
            codes = (tensor.numpy()[..., None] >> np.arange(0, 32, 4) & 15).reshape(len(tensor), -1)
            wide = np.repeat(as_float(scale), codes.shape[1] // scale.shape[1], 1)
            found[f"{base}.weight"] = torch.from_numpy(((codes - 8) * wide).astype(np.float32))
    return found


def steps_of(tensors, base):
    """Of the groups of a weight in E2M1."""
    scale = tensors[f"{base}.weight_scale"]
    if scale.dtype == torch.uint8:
        return np.exp2(as_float(scale) - 127)
    return as_float(scale) / tensors[f"{base}.weight_global_scale"].numpy()


# Most error of an element, as a part of the largest one that it can share a scale with: half the
# widest step, and for nvfp4 what E4M3 rounds off its scale. The largest of mxfp8 may be 256, from
# where on steps are as wide as those before 448.
HALF_STEP = {
    "fp8-tensor": 16 / 448,
    "mxfp8": 16 / 256,
    "mxfp4": 1 / 4,
    "nvfp4": (1 + 1 / 16) / 6,
    "w4a16": 0.5 / 7.5,
    "int8": 0.5 / 127,
}


@pytest.mark.parametrize("format_name", HALF_STEP)
def test_what_we_quantise_loads_and_is_near_what_it_was(source, quantised, format_name):
    weights = widened(load_file(quantised(format_name) / "model.safetensors"))
    plain = load_file(source / "model.safetensors")
    assert len(weights) == 2 * 7
    for name, weight in weights.items():
        error = (weight - plain[name]).abs().max()
        assert error <= HALF_STEP[format_name] * plain[name].abs().max() * 1.001
    wanted = reference_logprobs(source, weights)
    assert (logprobs(quantised(format_name)) - wanted).abs().max() < 1e-4


@pytest.mark.parametrize(("changes", "group"), [({}, 128), ({"intermediate_size": 224}, 32)])
def test_w4a16_takes_the_largest_groups_that_fit_all_weights(checkpoint, tmp_path, changes, group):
    quantize_checkpoint(checkpoint("llama", **SHAPE | changes), tmp_path / "out", "w4a16")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == group
    assert logprobs(tmp_path / "out").isfinite().all()


@pytest.mark.parametrize("format_name", ["nvfp4", "mxfp4", "w4a16"])
def test_a_weight_that_is_not_of_whole_groups_is_named(checkpoint, tmp_path, format_name):
    source = checkpoint("llama", **SHAPE | {"intermediate_size": 136})
    with pytest.raises(CheckpointError, match=r"down_proj.weight has 136 columns.*16|32"):
        quantize_checkpoint(source, tmp_path / "out", format_name)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format_name", list(FORMATS))
@pytest.mark.parametrize("value", [0.0, 1e-38, float("nan"), float("inf")])
def test_zeros_and_tiny_weights_stay_and_others_are_refused(source, tmp_path, format_name, value):
    shutil.copytree(source, tmp_path / "in")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"].fill_(value)
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    if value < 1:
        quantize_checkpoint(tmp_path / "in", tmp_path / "out", format_name)
        assert logprobs(tmp_path / "out").isfinite().all()
    else:
        with pytest.raises(
            CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight.*NaN or infinity"
        ):
            quantize_checkpoint(tmp_path / "in", tmp_path / "out", format_name)


# ---------------------------------------------------------------- the public tool as an oracle


@pytest.mark.parametrize("format_name", HALF_STEP)
def test_transformers_and_compressed_tensors_read_what_we_write(quantised, format_name):
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    folder = quantised(format_name)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        quantization_config=CompressedTensorsConfig(dequantize=True),
    )
    theirs = model.state_dict()
    for name, weight in widened(load_file(folder / "model.safetensors")).items():
        rounding = weight.abs().max() * 2**-8
        assert (theirs[name].float() - weight).abs().max() <= rounding


@pytest.mark.parametrize("layout", ["modelopt-nvfp4", "awq-128"])
def test_what_the_tool_converts_to_its_own_format_gives_the_same_logits(stored, tmp_path, layout):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.entrypoints import convert

    folder, _ = stored(layout)
    converters = {
        "modelopt-nvfp4": lambda: convert.ModelOptNvfp4Converter(
            targets=[r"re:.*_proj$"], ignore=["lm_head"]
        ),
        "awq-128": lambda: convert.AutoAWQConverter(targets=[r"re:.*_proj$"], ignore=["lm_head"]),
    }
    convert.convert_checkpoint(str(folder), str(tmp_path / "out"), converters[layout]())
    assert (logprobs(tmp_path / "out") - logprobs(folder)).abs().max() < 1e-4
