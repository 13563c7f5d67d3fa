"""Checkpoints of other tools that are broken or not supported are refused with the reason."""

import json
import shutil

import pytest
import torch
from checkpoint_layouts import LAYOUTS, SHAPE, store
from safetensors.torch import load_file, save_file

from vllm import LLM
from vllm.errors import CheckpointError
from vllm.formats.act_scheme import ActScheme
from vllm.formats.readers.base import StoredLayer
from vllm.formats.readers.fp8 import Fp8Config
from vllm.formats.readers.registry import resolve_quantization
from vllm.formats.weight_format import WeightFormat
from vllm.model_executor.layers.quantization.methods import QuantizationMethods

PROJECTION = "model.layers.1.mlp.up_proj."


def refused(source, folder, layout, says, edit=None, **config):
    """Stores `layout` with tensors of one projection edited, and loads it."""
    build, stored_config = LAYOUTS[layout]
    store(source, folder, build, stored_config | config)
    if edit is not None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=says):
        LLM(folder, skip_tokenizer_init=True, max_num_seqs=2)


@pytest.fixture(scope="module")
def source(checkpoint):
    return checkpoint("llama", **SHAPE)


@pytest.mark.parametrize(
    ("layout", "part"),
    [
        ("modelopt-nvfp4", "weight_scale_2"),
        ("modelopt-nvfp4", "input_scale"),
        ("ct-nvfp4", "weight_scale"),
        ("ct-fp8-channel", "weight_scale"),
        ("ct-mxfp8", "weight_scale"),
        ("modelopt-mxfp8", "weight_scale"),
        ("ct-mxfp4", "weight_scale"),
        ("ct-mxfp4", "weight_packed"),
        ("quark-mxfp4", "weight_scale"),
        ("ct-int4-32-zeros", "weight_zero_point"),
        ("awq-128", "qzeros"),
    ],
)
def test_a_missing_scale_is_named_with_what_is_there(source, tmp_path, layout, part):
    says = rf"lacks {PROJECTION}{part}; of {PROJECTION[:-1]} it holds {PROJECTION}\w+"
    refused(source, tmp_path, layout, says, lambda tensors: tensors.pop(PROJECTION + part))


@pytest.mark.parametrize("layout", ["ct-nvfp4", "ct-int4-128", "awq-128"])
def test_a_module_that_is_stored_twice_is_named_with_what_is_taken(source, tmp_path, layout):
    def edit(tensors):
        tensors[PROJECTION + "weight"] = torch.zeros(256, 128)

    says = rf"unknown to this model: {PROJECTION}weight; of .* takes {PROJECTION}(weight_pa|qw)"
    refused(source, tmp_path, layout, says, edit)


def test_zero_points_that_the_config_denies_are_named_with_what_is_taken(source, tmp_path):
    """Codes have 4 bits, so a zero point cannot be out of their range; only where none may be."""

    def edit(tensors):
        tensors[PROJECTION + "weight_zero_point"] = torch.zeros(32, 1, dtype=torch.int32)

    says = rf"unknown to this model: {PROJECTION}weight_zero_point; of .* takes {PROJECTION}weight_"
    refused(source, tmp_path, "ct-int4-128", says, edit)


@pytest.mark.parametrize("part", ["weight_zero_point", "qzeros"])
def test_zero_points_of_another_width_are_refused(source, tmp_path, part):
    layout = "awq-128" if part == "qzeros" else "ct-int4-32-zeros"

    def edit(tensors):
        wide = tensors[PROJECTION + part]
        tensors[PROJECTION + part] = wide.repeat_interleave(8, 1).to(torch.int32)

    refused(source, tmp_path, layout, rf"{PROJECTION}{part} has shape .*implies", edit)


@pytest.mark.parametrize(
    ("layout", "part", "change", "says"),
    [
        ("modelopt-nvfp4", "weight", lambda t: t[:, :-1], r"shape \[256, 63\].*\[256, 64\]"),
        ("modelopt-nvfp4", "weight", lambda t: t.int(), "type I32, but uint8 is needed"),
        ("ct-nvfp4", "weight_scale", lambda t: t.float(), "type F32, but float8_e4m3fn is"),
        ("ct-nvfp4", "weight_scale", lambda t: t[:, :4], r"shape \[256, 4\].*\[256, 8\]"),
        ("ct-fp8-channel", "weight_scale", lambda t: t[0], r"shape \[1\].*\[256, 1\]"),
        ("ct-fp8-block", "weight_scale", lambda t: t[:1], r"shape \[1, 1\].*\[2, 1\]"),
        ("ct-mxfp8", "weight_scale", lambda t: t[:, :2], r"shape \[256, 2\].*\[256, 4\]"),
        ("ct-mxfp8", "weight_scale", lambda t: t.float(), "type F32, but uint8, float8_e8m0fnu is"),
        ("modelopt-mxfp8", "weight", lambda t: t.view(torch.uint8), "type U8, but float8_e4m3fn"),
        ("ct-mxfp4", "weight_scale", lambda t: t[:, :2], r"shape \[256, 2\].*\[256, 4\]"),
        ("ct-mxfp4", "weight_packed", lambda t: t[:, :-16], r"shape \[256, 48\].*\[256, 64\]"),
        ("ct-mxfp4", "weight_packed", lambda t: t.short(), "type I16, but uint8 is needed"),
        ("ct-int4-128", "weight_packed", lambda t: t[1:], r"shape \[255, 16\].*\[256, 16\]"),
        ("ct-int4-32-zeros", "weight_zero_point", lambda t: t.to(torch.int8), "type I8, but int32"),
        ("awq-128", "qweight", lambda t: t.T, r"shape \[32, 128\].*\[128, 32\]"),
        ("awq-128", "scales", lambda t: t.T, r"shape \[256, 1\].*\[1, 256\]"),
    ],
)
def test_a_wrong_shape_or_type_is_named_with_the_right_one(
    source, tmp_path, layout, part, change, says
):
    def edit(tensors):
        tensors[PROJECTION + part] = change(tensors[PROJECTION + part]).contiguous()

    refused(source, tmp_path, layout, rf"{PROJECTION}{part} (has|is of) {says}", edit)


@pytest.mark.parametrize(
    ("layout", "part", "value", "says"),
    [
        ("modelopt-nvfp4", "weight_scale", float("nan"), "not negative; it holds nan"),
        ("modelopt-nvfp4", "weight_scale", -2.0, "not negative; it holds -2"),
        ("modelopt-nvfp4", "weight_scale_2", float("inf"), "above zero; it holds inf"),
        ("modelopt-nvfp4", "input_scale", 0.0, "above zero; it holds 0"),
        ("ct-nvfp4", "weight_global_scale", 0.0, "above zero; it holds 0"),
        ("ct-nvfp4", "input_global_scale", -1.0, "above zero; it holds -1"),
        ("ct-fp8-channel", "weight_scale", float("nan"), "not negative; it holds nan"),
        ("ct-int4-128", "weight_scale", float("inf"), "not negative; it holds inf"),
        ("awq-128", "scales", float("nan"), "not negative; it holds nan"),
    ],
)
def test_a_scale_that_cannot_be_is_named_with_its_value(
    source, tmp_path, layout, part, value, says
):
    def edit(tensors):
        wide = tensors[PROJECTION + part].float()
        wide.view(-1)[-1] = value
        tensors[PROJECTION + part] = wide.to(tensors[PROJECTION + part].dtype)

    refused(source, tmp_path, layout, f"{PROJECTION}{part}: scales must be.*{says}", edit)


@pytest.mark.parametrize("layout", ["ct-mxfp8", "modelopt-mxfp8", "ct-mxfp4"])
def test_an_exponent_that_is_nan_is_named(source, tmp_path, layout):
    def edit(tensors):
        tensors[PROJECTION + "weight_scale"][3, 1] = 255

    says = f"{PROJECTION}weight_scale: scales must be UE8M0 exponents of 0 to 254; it holds 255"
    refused(source, tmp_path, layout, says, edit)


@pytest.mark.parametrize(
    ("changes", "config", "says"),
    [
        ({"intermediate_size": 144}, "ct-mxfp8", "down_proj: 144 columns.*groups of 32"),
        ({"intermediate_size": 144}, "modelopt-mxfp8", "down_proj: 144 columns.*groups of 32"),
        ({"intermediate_size": 144}, "ct-mxfp4", "down_proj: 144 columns.*groups of 32"),
        ({"intermediate_size": 136}, "modelopt-nvfp4", "down_proj: 136 columns.*groups of 16"),
        ({"intermediate_size": 192}, "ct-int4-128", "down_proj: 192 columns.*groups of 128"),
        ({"intermediate_size": 192}, "awq-128", "down_proj: 192 columns.*groups of 128"),
        ({"intermediate_size": 132}, "awq-32", "gate_up_proj: 132 rows cannot be packed by 8"),
    ],
)
def test_a_layer_that_is_not_of_whole_groups_is_named(checkpoint, tmp_path, changes, config, says):
    shutil.copytree(checkpoint("llama", **SHAPE | changes), tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    fields = json.loads(path.read_text()) | {"quantization_config": LAYOUTS[config][1]}
    path.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=says):
        LLM(tmp_path / "model", skip_tokenizer_init=True, max_num_seqs=2)


def changed(layout, *path, value):
    config = json.loads(json.dumps(LAYOUTS[layout][1]))
    place = config
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return config


WEIGHTS = ("config_groups", "group_0", "weights")
INPUTS = ("config_groups", "group_0", "input_activations")
QKV = tuple(f"model.layers.0.self_attn.{part}_proj" for part in "qkv")
NAMED = {
    f"group_{index}": LAYOUTS[layout][1]["config_groups"]["group_0"]
    | {"targets": [target], "format": LAYOUTS[layout][1]["format"]}
    for index, (target, layout) in enumerate(
        [("re:.*q_proj", "ct-nvfp4"), ("Linear", "ct-int4-64-fp16")]
    )
}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            changed("modelopt-fp8", "quant_algo", value="MIXED_PRECISION"),
            "MIXED_PRECISION needs quantized_layers.*it is None",
        ),
        (changed("modelopt-nvfp4", "group_size", value=32), "group_size 32.*takes 16"),
        (changed("awq-128", "bits", value=8), "AWQ bits 8.*takes 4"),
        (changed("awq-128", "group_size", value=100), "AWQ group_size 100.*32, 64, 128"),
        (changed("awq-128", "group_size", value=128.0), "AWQ group_size 128.0.*32, 64, 128"),
        (changed("gptq-128", "group_size", value=128.0), "GPTQ group_size 128.0.*32, 64, 128"),
        (changed("awq-128", "group_size", value=-1), "AWQ group_size -1.*32, 64, 128"),
        (changed("awq-128", "version", value="gemv"), "AWQ version 'gemv'.*takes gemm"),
        (changed("awq-128", "zero_point", value=False), "AWQ zero_point False.*takes True"),
        (changed("ct-nvfp4", "format", value="marlin-24"), "format 'marlin-24'.*pack-quantized"),
        (
            changed("ct-nvfp4", "config_groups", "group_0", "targets", value=[]),
            "config_groups.group_0 has no targets: it takes names of layers, re: expr.*or Linear",
        ),
        (changed("ct-nvfp4", "quantization_status", value="frozen"), "'frozen'.*takes compressed"),
        (changed("ct-nvfp4", "sparsity_config", value={"format": "sparse-24-bitmask"}), "dense"),
        (changed("ct-nvfp4", "ignore", value=["re:("]), r"re:\(: .*unterminated"),
        (changed("ct-nvfp4", *WEIGHTS, "num_bits", value=8), "'num_bits': 8.*it takes NVFP4, FP8"),
        *(
            (changed(layout, *WEIGHTS, "dynamic", value=True), "'dynamic': True.*it takes NVFP4")
            for layout in (
                "ct-nvfp4",
                "ct-fp8-channel",
                "ct-mxfp8",
                "ct-mxfp4",
                "ct-int8",
                "ct-int4-128",
            )
        ),
        *(
            (changed(layout, *place, "symmetric", value=False), "'symmetric': False.*it takes NV")
            for layout in ("ct-fp8-channel", "ct-mxfp8", "ct-mxfp4", "ct-int8")
            for place in (WEIGHTS, INPUTS)
        ),
        (changed("ct-mxfp8", *WEIGHTS, "group_size", value=64), "'group_size': 64.*MXFP8"),
        (changed("ct-mxfp8", *WEIGHTS, "type", value="int"), "'type': 'int'.*it takes NVFP4, FP8"),
        (changed("ct-mxfp8", *INPUTS, "dynamic", value=False), "'dynamic': False.*MXFP8"),
        (changed("modelopt-mxfp8", "group_size", value=16), "group_size 16.*takes 32 for mxfp8"),
        (changed("modelopt-mxfp4", "group_size", value=16), "group_size 16.*takes 32 for mxfp4"),
        *(
            (changed("quark-mxfp4", "global_quant_config", *path, value=value), says)
            for path, value, says in [
                (("weight", "dtype"), "int4", "'dtype': 'int4'.*it takes weights in MXFP4 .*fp4"),
                (("weight", "group_size"), 16, "'group_size': 16.*it takes weights in"),
                (("input_tensors", "is_dynamic"), False, "inputs in MXFP4 .is_dynamic true"),
                (("input_tensors", "dtype"), "fp8_e4m3", "'fp8_e4m3'.*fp8_e4m3 per_tensor, or not"),
                (("output_tensors",), {"dtype": "fp8_e4m3"}, "and no output_tensors"),
            ]
        ),
        (changed("quark-mxfp4", "export", "weight_format", value="fake_quantized"), "'fake_quant"),
        (changed("quark-mxfp4", "layer_quant_config", value={"*.mlp": {}}), "of [*].mlp {} is not"),
        (changed("quark-mxfp4", "layer_quant_config", value=["*.mlp"]), "takes a JSON object"),
        (changed("quark-mxfp4", "layer_type_quant_config", value={"a": 1}), "by names of layers"),
        (changed("quark-mxfp4", "exclude", value=["re:.*q_proj"]), "only .*q_proj is listed"),
        (changed("ct-mxfp4", *WEIGHTS, "group_size", value=16), "'group_size': 16.*MXFP4"),
        (changed("ct-mxfp4", *INPUTS, "dynamic", value=False), "'dynamic': False.*MXFP4"),
        (changed("ct-mxfp4", *INPUTS, "type", value="int"), "'type': 'int'.*it takes NVFP4"),
        (changed("ct-int4-128", *WEIGHTS, "actorder", value="group"), "'actorder': 'group'"),
        (changed("ct-int4-128", *WEIGHTS, "strategy", value="channel"), "'strategy': 'channel'"),
        (changed("ct-int4-128", *WEIGHTS, "group_size", value=48), "'group_size': 48"),
        (
            changed(
                "ct-nvfp4",
                "config_groups",
                "again",
                value=NAMED["group_1"],
            ),
            "quantised twice, by config_groups group_0 and again",
        ),
        (
            changed("ct-nvfp4", "config_groups", value=NAMED),
            "q_proj as nvfp4 with nvfp4-group16 activations, .*k_proj as int4-group.64., "
            ".*v_proj as int4-group.64.: they are computed as one layer",
        ),
        (
            changed("ct-nvfp4", "ignore", value=["re:.*q_proj"]),
            "q_proj not quantised, .*k_proj as nvfp4",
        ),
        (
            changed("ct-int4-w4a8", *INPUTS, "dynamic", value=False),
            "'dynamic': False.*FP8 per token or not quantised",
        ),
        (changed("ct-int4-w4a8", *INPUTS, "type", value="int"), "'type': 'int'.*it takes NVFP4"),
    ],
)
def test_a_scheme_that_is_not_supported_is_named_with_those_that_are(config, says):
    with pytest.raises(CheckpointError, match=says):
        resolve_quantization(config, None, "model").layer_format(QKV)


def places(config, path=()):
    for key, value in config.items() if isinstance(config, dict) else ():
        yield (*path, key)
        yield from places(value, (*path, key))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "junk", [None, 3, -1, "x", [], {}, [3], ["Linear"], {"a": 1}, True], ids=repr
)
def test_a_config_with_anything_in_any_place_is_taken_or_refused_with_an_error_of_ours(
    layout, junk
):
    for path in places(LAYOUTS[layout][1]):
        if path == ("quant_method",):
            continue
        try:
            resolve_quantization(changed(layout, *path, value=junk), None, "m").layer_format(QKV)
        except CheckpointError as error:
            assert str(error)


def test_a_format_that_no_method_loads_is_an_error_that_names_layer_and_format():
    class Reader(Fp8Config):
        def stored_layer(self, names):
            return StoredLayer(WeightFormat.of("bf16"), (ActScheme.NONE,))

    methods = QuantizationMethods(Reader())
    for method in (methods.linear_method, methods.moe_method):
        with pytest.raises(CheckpointError, match=r"up_proj: weights in bf16 .*fp8-block"):
            method([PROJECTION.rstrip(".")])
