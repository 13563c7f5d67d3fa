"""Checkpoints whose layers have formats of their own: ModelOpt's MIXED_PRECISION, and several
config_groups of compressed-tensors."""

import json
import re

import pytest
from checkpoint_layouts import CT, LAYOUTS, gptq_config, is_expert, is_projection, store, store_each
from safetensors.torch import load_file
from test_qwen3_moe import (
    PROMPT,
    load,
    logprobs,
    prompt_logprobs,
    records,
    reference_logprobs,
    refused,
    write,
)

from vllm.entrypoints.cli.main import main
from vllm.errors import CheckpointError
from vllm.formats.readers.registry import resolve_quantization

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_attention_heads": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
# The layout of checkpoint_layouts.py that each quant_algo stands for.
ALGORITHMS = {
    "FP8": "modelopt-fp8",
    "FP8_PB_WO": "modelopt-fp8-block",
    "NVFP4": "modelopt-nvfp4",
    "W4A16_NVFP4": "modelopt-nvfp4",
    "MXFP8": "modelopt-mxfp8",
}
LAYERS = {"llama": 2, "qwen3": 2, "qwen3_moe": 2, "qwen3_5": 4, "qwen3_5_moe": 4}


def algorithm_of(name):
    """Of a weight; "" for one that is not quantised."""
    layer, last = int(name.split(".")[2]), name.split(".")[-2]
    if is_expert(name):
        return "NVFP4" if layer % 2 else "W4A16_NVFP4"
    if "self_attn" in name:
        return ("FP8" if layer % 2 == 0 else "MXFP8") if last != "o_proj" else ""
    if last == "down_proj":
        return "W4A16_NVFP4" if layer == 0 else "FP8_PB_WO"
    return "NVFP4" if last in ("gate_proj", "up_proj") else ""


def build_of(name):
    algorithm = is_projection(name) and algorithm_of(name)
    if algorithm == "W4A16_NVFP4":
        return lambda weight: without_input_scale(LAYOUTS["modelopt-nvfp4"][0](weight))
    return LAYOUTS[ALGORITHMS[algorithm]][0] if algorithm else None


def without_input_scale(built):
    stored, wanted = built
    return {part: t for part, t in stored.items() if part != "input_scale"}, wanted


def mixed(source, **changes):
    """quantization_config that says each layer's own algorithm, as ModelOpt writes it."""
    layers = {}
    for name in () if "quantized_layers" in changes else load_file(source / "model.safetensors"):
        if is_projection(name) and (algorithm := algorithm_of(name)):
            entry = {"quant_algo": algorithm}
            group = {"NVFP4": 16, "W4A16_NVFP4": 16, "MXFP8": 32}.get(algorithm)
            entry |= {"group_size": group} if group else {}
            layers[name.removesuffix(".weight")] = entry
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["lm_head"]}
    return config | {"quantized_layers": layers} | changes


@pytest.fixture(scope="module")
def stored(checkpoint, tmp_path_factory):
    """stored(model) -> (source, folder, checkpoint of the weights it stands for); made once."""
    made = {}

    def make(model):
        if model not in made:
            source = checkpoint(model, **SHAPE, num_hidden_layers=LAYERS[model])
            folder = tmp_path_factory.mktemp(model)
            weights = store_each(source, folder, build_of, mixed(source))
            tensors = load_file(source / "model.safetensors") | weights
            made[model] = source, folder, write(source, folder / "wide", tensors)
        return made[model]

    return make


# ---------------------------------------------------------------- ModelOpt


@pytest.mark.parametrize("model", LAYERS)
def test_each_layer_has_the_format_of_its_entry_and_the_model_its_logits(stored, model):
    source, folder, wide = stored(model)
    llm = load(folder)
    found = {str(d.problem.weight) for family in ("linear", "moe") for _, d in records(llm, family)}
    wanted = {"nvfp4", "fp32"}
    if model in ("llama", "qwen3"):
        wanted |= {"fp8-channel", "fp8-block[128x128]", "mxfp8"}
    assert found >= wanted
    assert (prompt_logprobs(llm, [PROMPT])[0] - reference_logprobs(wide)).abs().max() < 1e-4
    assert (reference_logprobs(source) - reference_logprobs(wide)).abs().max() > 1e-3


def test_activations_are_those_of_each_layers_own_algorithm(stored):
    schemes = {
        key: [str(one) for one in d.problem.act]
        for key, d in records(load(stored("llama")[1]), "linear")
    }
    assert schemes["model.layers.0.self_attn.qkv_proj"] == ["static-tensor", "none"]
    assert schemes["model.layers.0.self_attn.o_proj"] == ["none"]
    assert schemes["model.layers.0.mlp.gate_up_proj"] == ["nvfp4-group16", "none"]
    assert schemes["model.layers.0.mlp.down_proj"] == ["none"]
    assert schemes["model.layers.1.mlp.down_proj"] == ["dynamic-group128", "none"]


@pytest.mark.parametrize("says", ["nothing", "no layers"])
def test_the_layers_may_be_listed_beside_config_json(stored, tmp_path, says, capsys):
    source, folder, wide = stored("llama")
    beside = {"nothing": None, "no layers": mixed(source, quantized_layers={})}[says]
    write(source, tmp_path, load_file(folder / "model.safetensors"), quantization_config=beside)
    whole = mixed(source)
    nested = {"exclude_modules": whole.pop("ignore"), "kv_cache_quant_algo": None} | whole
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": nested}))
    assert (logprobs(tmp_path) - reference_logprobs(wide)).abs().max() < 1e-4
    main(["kernels", "explain", str(tmp_path), "--device", "sm_100", "--libs", "none"])
    assert "linear nvfp4:" in capsys.readouterr().out


def test_globs_and_parents_name_many_layers_at_once(stored, tmp_path):
    source, folder, wide = stored("qwen3_moe")
    layers = {
        "model.layers.0.self_attn.[qkv]_proj*": {"quant_algo": "FP8"},
        "model.layers.1.self_attn.[qkv]_proj*": {"quant_algo": "MXFP8"},
        "model.layers.0.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "model.layers.1.mlp.experts.*": {"quant_algo": "NVFP4", "group_size": 16},
    }
    config = mixed(source, quantized_layers=layers)
    write(source, tmp_path, load_file(folder / "model.safetensors"), quantization_config=config)
    assert (logprobs(tmp_path) - reference_logprobs(wide)).abs().max() < 1e-4


def test_an_excluded_layer_is_not_quantised_even_where_it_has_an_entry(stored, tmp_path):
    source, folder, wide = stored("llama")
    plain, name = load_file(source / "model.safetensors"), "model.layers.1.mlp.down_proj"
    tensors = load_file(folder / "model.safetensors")
    tensors = {key: t for key, t in tensors.items() if not key.startswith(name)}
    tensors[f"{name}.weight"] = plain[f"{name}.weight"]
    config = mixed(source, ignore=["lm_head", "*layers.1.mlp.down*"])
    kept = load_file(wide / "model.safetensors") | {f"{name}.weight": plain[f"{name}.weight"]}
    write(source, tmp_path / "some", tensors, quantization_config=config)
    wanted = reference_logprobs(write(source, tmp_path / "wide", kept))
    assert (logprobs(tmp_path / "some") - wanted).abs().max() < 1e-4


def test_blocks_may_have_deepseeks_names_and_shape(stored, tmp_path):
    source, folder, wide = stored("llama")
    tensors, prefix = load_file(folder / "model.safetensors"), "model.layers.1.mlp.down_proj"
    scales = tensors.pop(f"{prefix}.weight_scale")
    tensors[f"{prefix}.weight_scale_inv"] = scales[:, 0, :, 0].contiguous()
    config = mixed(source)
    config["quantized_layers"][prefix]["quant_algo"] = "FP8_BLOCK_SCALES"
    write(source, tmp_path, tensors, quantization_config=config)
    assert (logprobs(tmp_path) - reference_logprobs(wide)).abs().max() < 1e-4


@pytest.mark.slow
def test_two_ranks_give_the_logits_of_one(stored):
    """Each part of the model is cut in its own format."""
    _, folder, wide = stored("qwen3_moe")
    both = logprobs(folder, tensor_parallel_size=2)
    assert (both - reference_logprobs(wide)).abs().max() < 1e-4
    assert (both - logprobs(folder)).abs().max() < 1e-5


# ---------------------------------------------------------------- compressed-tensors

GROUPS = {
    "group_0": ("ct-fp8-channel", ["re:.*self_attn.*"]),
    "group_1": ("ct-int4-128", ["Linear"]),
    "group_2": ("ct-nvfp4", ["model.layers.1.mlp.down_proj", "re:.*up_proj$", "re:.*gate_proj$"]),
}


def grouped(groups, **changes):
    made = {}
    for name, (layout, targets) in groups.items():
        config = LAYOUTS[layout][1]
        group = config["config_groups"]["group_0"] | {"format": config["format"]}
        made[name] = group | {"targets": targets}
    config = CT | {"format": "mixed-precision", "ignore": ["lm_head", "re:.*mlp.gate$"]}
    return config | {"config_groups": made} | changes


def group_build(name):
    layout = "ct-int4-128"
    if "self_attn" in name:
        layout = "ct-fp8-channel"
    elif "layers.1.mlp.down_proj" in name or "up_proj" in name or "gate_proj" in name:
        layout = "ct-nvfp4"
    return LAYOUTS[layout][0] if is_projection(name) else None


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_a_name_outranks_an_expression_and_that_a_class(checkpoint, tmp_path, model):
    source = checkpoint(model, **SHAPE, num_hidden_layers=2)
    weights = store_each(source, tmp_path, group_build, grouped(GROUPS))
    tensors = load_file(source / "model.safetensors") | weights
    wide = write(source, tmp_path / "wide", tensors)
    assert (logprobs(tmp_path) - reference_logprobs(wide)).abs().max() < 1e-4


@pytest.mark.parametrize("swapped", [False, True])
def test_of_two_expressions_the_library_takes_the_one_that_sorts_first(swapped):
    """As its own apply_quantization_config resolves them, whatever the order of groups."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    torch = pytest.importorskip("torch")
    targets = [("FP8_DYNAMIC", "ct-fp8-channel", "re:.*q_proj"), ("W4A16", "ct-int4-128", "re:a.q")]
    chosen = dict(enumerate(reversed(targets) if swapped else targets))
    model = torch.nn.Module()
    model.a = torch.nn.Module()
    model.a.q_proj = torch.nn.Linear(128, 128)
    groups = {
        f"group_{i}": quantization.preset_name_to_scheme(scheme, [target])
        for i, (scheme, _, target) in chosen.items()
    }
    theirs = quantization.QuantizationConfig(
        config_groups=groups, format="dense", quantization_status="initialized"
    )
    quantization.apply_quantization_config(model, theirs)
    ours = resolve_quantization(
        grouped({f"group_{i}": (layout, [target]) for i, (_, layout, target) in chosen.items()}),
        None,
        "model",
    )
    weight, _ = ours.layer_format(["a.q_proj"])
    assert model.a.q_proj.quantization_scheme.weights.num_bits == 8
    assert str(weight) == "fp8-channel"


# ---------------------------------------------------------------- configs that are wrong


def entry(algorithm, **more):
    return {"quant_algo": algorithm} | more


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ({}, r"needs quantized_layers.*it is \{\}"),
        (["q_proj"], r"needs quantized_layers.*it is \['q_proj'\]"),
        (
            {"model.layers.0.mlp.up_proj": entry("NVFP4_AWQ")},
            "'NVFP4_AWQ' of model.layers.0.mlp.up_proj is not supported: it takes NVFP4, W4A16_NV",
        ),
        ({"model.layers.0.mlp": "FP8"}, "quant_algo None of model.layers.0.mlp is not supported"),
        (
            {"model.layers.0.mlp": entry("NVFP4", group_size=32)},
            "group_size 32 of model.layers.0.mlp is not supported: it takes 16 for nvfp4",
        ),
        (
            {"model.layers.0.mlp": entry("FP8_PB_WO", group_size=64)},
            "group_size 64 of model.layers.0.mlp is not supported: it takes 128 for fp8-block",
        ),
        (
            {"model.layers.7.mlp.up_proj": entry("FP8")},
            "stores model.layers.7.mlp.up_proj quantised, but this model has no linear layer or "
            "expert of that name; did you mean model.layers.",
        ),
        (
            {"model.layers.0.mlp.experts.9.up_proj": entry("FP8")},
            "stores model.layers.0.mlp.experts.9.up_proj quantised, but this model has no",
        ),
        (
            {"q_proj": entry("FP8"), "k_proj": entry("NVFP4"), "o_proj": entry("FP8")},
            "model.layers.0.self_attn.q_proj as fp8-tensor with static-tensor activations, "
            "model.layers.0.self_attn.k_proj as nvfp4 with nvfp4-group16 activations, "
            "model.layers.0.self_attn.v_proj not quantised: they are computed as one layer",
        ),
        (
            {"model.layers.0.mlp.experts.[01].*": entry("FP8"), "*experts.2*": entry("NVFP4")},
            r"mlp.experts.0.gate_proj as fp8-channel, .*experts.2.gate_proj as nvfp4, "
            r".*experts.3.gate_proj as floats: the experts of a layer must be stored alike",
        ),
        (
            {"*.down_proj": entry("FP8"), "model.layers.0.mlp": entry("NVFP4")},
            "stores model.layers.0.mlp.experts.0.down_proj as FP8 and as NVFP4: it takes one",
        ),
    ],
)
def test_a_wrong_table_of_layers_is_refused_before_a_weight_is_read(stored, tmp_path, layers, says):
    source, folder, _ = stored("qwen3_moe")
    config = mixed(source, quantized_layers=layers)
    tensors = load_file(folder / "model.safetensors")
    refused(write(source, tmp_path, tensors, quantization_config=config), says)


EXPERT = r"model\.layers\.0\.mlp\.experts\."
CT_INT4 = LAYOUTS["ct-int4-128"][1]


@pytest.mark.parametrize(
    ("config", "others"),
    [
        ({"quantized_layers": {"model.layers.0.mlp.experts.0.*": entry("FP8")}}, "1"),
        (LAYOUTS["modelopt-fp8"][1] | {"ignore": ["model.layers.0.mlp.experts.3"]}, "3"),
        (CT_INT4 | {"ignore": ["lm_head", "re:.*experts.0.*"]}, "1"),
        (grouped({"group_0": ("ct-nvfp4", ["re:.*experts.[012].*"])}), "3"),
        (gptq_config(dynamic={"-:.*experts\\.3\\.": {}}), "3"),
        (LAYOUTS["awq-128"][1] | {"modules_to_not_convert": ["experts.3"]}, "3"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["experts.3"]}, "3"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["experts.3"]}, "3"),
    ],
    ids=["mixed", "modelopt", "ct-ignore", "ct-targets", "gptq", "awq", "fp8", "mxfp4"],
)
def test_experts_that_are_quantised_in_part_are_refused(stored, tmp_path, capsys, config, others):
    source, folder, _ = stored("qwen3_moe")
    config = config if "quant_method" in config else mixed(source, **config)
    write(source, tmp_path, load_file(folder / "model.safetensors"), quantization_config=config)
    says = rf"{EXPERT}0\.gate_proj as .*{EXPERT}{others}\.gate_proj as .*must be stored alike"
    refused(tmp_path, says)
    main(["kernels", "explain", str(tmp_path), "--device", "cpu", "--libs", "none"])
    assert re.search(says, capsys.readouterr().err)


@pytest.mark.parametrize(
    "config",
    [
        {"quantized_layers": {"model.layers.9.*": entry("FP8"), "*.mlp.*": entry("MXFP8")}},
        {"quantized_layers": {"*.self_attn.qkv": entry("FP8"), "*.mlp.*": entry("MXFP8")}},
        grouped({"group_0": ("ct-nvfp4", ["Linear", r"re:model\.layers\.9\..*"])}),
    ],
    ids=["layer", "part", "expression"],
)
def test_a_pattern_of_quantised_layers_that_matches_none_is_refused(stored, tmp_path, config):
    source, folder, _ = stored("llama")
    config = config if "quant_method" in config else mixed(source, **config)
    tensors = load_file(folder / "model.safetensors")
    refused(
        write(source, tmp_path, tensors, quantization_config=config),
        r"stores (model.layers.9.\*|\*.self_attn.qkv|re:model.*) quantised, but this model has no "
        r"linear layer or expert of that name$",
    )


def test_a_group_that_names_a_layer_that_is_not_there_is_refused(stored, tmp_path, capsys):
    source, folder, _ = stored("llama")
    config = grouped({"group_0": ("ct-nvfp4", ["Linear", "model.layers.0.mlp.up_pro"])})
    write(source, tmp_path, load_file(folder / "model.safetensors"), quantization_config=config)
    says = "stores model.layers.0.mlp.up_pro quantised, but this model has no linear layer"
    refused(tmp_path, says)
    assert main(["kernels", "explain", str(tmp_path), "--device", "cpu", "--libs", "none"]) == 1
    assert says in capsys.readouterr().err


def test_layers_outside_of_the_text_model_may_be_listed(stored, checkpoint, tmp_path):
    source = checkpoint("qwen3_5-multimodal", **SHAPE)
    layers = {
        "model.visual.blocks.0.attn.qkv": entry("FP8"),
        "mtp.layers.0.mlp.up_proj": entry("FP8"),
        "model.visual.merger.*": entry("FP8"),
        "model.language_model.layers.2.self_attn": entry("FP8"),
    }
    build = LAYOUTS["modelopt-fp8"][0]

    def picks(name):
        return ".layers.2.self_attn" in name and is_projection(name)

    config = mixed(source, quantized_layers=layers)
    weights = store(source, tmp_path, build, config, picks)
    assert len(weights) == 4
    tensors = load_file(source / "model.safetensors") | weights
    wide = write(source, tmp_path / "wide", tensors)
    assert (logprobs(tmp_path) - logprobs(wide)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("model.layers.1.mlp.down_proj.weight_scale", None, "lacks .*down_proj.weight_scale; of"),
        ("model.layers.0.self_attn.k_proj.input_scale", None, "lacks .*k_proj.input_scale; of"),
        (
            "model.layers.1.mlp.down_proj.weight_scale",
            lambda t: t[:, :, :1],
            r"down_proj.weight_scale has shape \[1, 1, 1, 1\], but config.json implies \[1, 2\]",
        ),
        (
            "model.layers.1.mlp.down_proj.weight_scale",
            lambda t: t.double(),
            "down_proj.weight_scale is of type F64, but bfloat16, float16, float32 is needed",
        ),
        (
            "model.layers.0.mlp.up_proj.weight_scale",
            lambda t: t.float(),
            "up_proj.weight_scale is of type F32, but float8_e4m3fn is needed",
        ),
    ],
)
def test_a_missing_or_wrong_scale_is_named(stored, tmp_path, name, change, says):
    source, folder, _ = stored("llama")
    tensors = load_file(folder / "model.safetensors")
    changed = tensors.pop(name)
    if change is not None:
        tensors[name] = change(changed).contiguous()
    write(source, tmp_path, tensors, quantization_config=mixed(source))
    with pytest.raises(CheckpointError, match=says):
        load(tmp_path)


def test_tensors_of_another_algorithm_than_the_entrys_are_refused(stored, tmp_path):
    source, folder, _ = stored("llama")
    config = mixed(source)
    config["quantized_layers"]["model.layers.1.mlp.down_proj"] = entry("NVFP4")
    tensors = load_file(folder / "model.safetensors")
    refused(
        write(source, tmp_path, tensors, quantization_config=config),
        r"lacks model.layers.1.mlp.down_proj.weight_scale_2",
    )
