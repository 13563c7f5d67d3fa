"""GPTQ checkpoints: order of columns, overrides of single layers, and what cannot be."""

import json
import shutil

import numpy as np
import pytest
import torch
from checkpoint_layouts import SHAPE, gptq, gptq_config, store
from safetensors.torch import load_file, save_file
from test_fp8 import logprobs, reference_logprobs

from vllm import LLM
from vllm.errors import CheckpointError
from vllm.formats.readers.gptq import GptqConfig
from vllm.formats.readers.registry import resolve_quantization

UP = "model.layers.1.mlp.up_proj."


def shuffled(num_columns):
    return np.random.default_rng(num_columns).permutation(num_columns)


@pytest.fixture(scope="module")
def source(checkpoint):
    return checkpoint("llama", **SHAPE)


@pytest.fixture
def write(source, tmp_path):
    """write(build, config, edit of the tensors) -> float32 weights; in tmp_path."""

    def written(build, config, edit=None, picks=lambda name: name.endswith("_proj.weight")):
        weights = store(source, tmp_path, build, config, picks)
        if edit is not None:
            tensors = load_file(tmp_path / "model.safetensors")
            edit(tensors)
            save_file(tensors, tmp_path / "model.safetensors")
        return weights

    return written


def refused(folder, says):
    with pytest.raises(CheckpointError, match=says):
        LLM(folder, skip_tokenizer_init=True, max_num_seqs=2)


# ---------------------------------------------------------------- activation order

ORDERED = [
    ("4 bits", {"group": 32}, {"group_size": 32}),
    ("zero points", {"group": 64, "sym": False}, {"group_size": 64, "sym": False}),
    ("8 bits", {"bits": 8, "group": 32, "sym": False},
     {"bits": 8, "group_size": 32, "sym": False}),
]  # fmt: skip


@pytest.mark.parametrize("backend", [None, "torch"])
@pytest.mark.parametrize(("how", "fields"), [o[1:] for o in ORDERED], ids=[o[0] for o in ORDERED])
def test_columns_in_activation_order(source, write, tmp_path, how, fields, backend):
    weights = write(gptq(**how, order=shuffled), gptq_config(desc_act=True, **fields))
    groups = load_file(tmp_path / "model.safetensors")[UP + "g_idx"]
    assert not bool((groups.diff() >= 0).all()), "or nothing is reordered"
    wanted = reference_logprobs(source, weights)
    assert (logprobs(tmp_path, linear_backend=backend) - wanted).abs().max() < 1e-4


def test_random_weights_in_activation_order_are_reordered(write, tmp_path):
    write(gptq(group=32, order=shuffled), gptq_config(group_size=32, desc_act=True))
    assert bool(logprobs(tmp_path, load_format="dummy").isfinite().all())


def test_weights_that_are_merged_must_have_one_order(write, tmp_path):
    def edit(tensors):
        tensors[UP + "g_idx"] = tensors[UP + "g_idx"].flip(0)

    write(gptq(group=32, order=shuffled), gptq_config(group_size=32, desc_act=True), edit)
    refused(tmp_path, r"layers\.1\.mlp\.gate_proj and .*up_proj are computed.*g_idx differ")


@pytest.mark.parametrize("value", [None, 0])
def test_without_activation_order_groups_may_be_missing_or_zero(source, write, tmp_path, value):
    def edit(tensors):
        for name in [name for name in tensors if name.endswith("g_idx")]:
            if value is None:
                del tensors[name]
            else:
                tensors[name].fill_(value)

    weights = write(gptq(group=32), gptq_config(group_size=32), edit)
    assert (logprobs(tmp_path) - reference_logprobs(source, weights)).abs().max() < 1e-4


@pytest.mark.parametrize("meta", [True, False])
def test_static_groups_leave_columns_in_their_order(source, write, tmp_path, meta):
    fields = {"meta": {"static_groups": True}} if meta else {"static_groups": True}
    config = gptq_config(group_size=32, desc_act=True, **fields)
    weights = write(gptq(group=32), config)
    assert (logprobs(tmp_path) - reference_logprobs(source, weights)).abs().max() < 1e-4
    assert not GptqConfig.from_checkpoint(config).stored_layer([UP + "x"]).is_reordered


# ---------------------------------------------------------------- single layers


def test_dynamic_leaves_layers_out_and_overrides_others(source, write, tmp_path):
    dynamic = {
        r"-:.*\.0\.mlp\..*": {},
        r"+:.*\.1\.self_attn\..*": {"bits": 8, "group_size": 32},
        r".*\.1\.mlp\.down_proj": {"group_size": -1, "sym": False},
    }
    tensors, weights = {}, {}
    builds = {
        "0.mlp": None,
        "1.self_attn": gptq(8, 32),
        "1.mlp.down_proj": gptq(group=-1, sym=False),
    }
    for name, tensor in load_file(source / "model.safetensors").items():
        own = [builds[part] for part in builds if part in name]
        build = own[0] if own else gptq()
        if not name.endswith("_proj.weight") or build is None:
            tensors[name] = tensor
            continue
        pieces, weight = build(tensor.numpy())
        tensors |= {name.replace("weight", part): piece for part, piece in pieces.items()}
        weights[name] = torch.from_numpy(weight)
    write(gptq(), gptq_config(dynamic=dynamic), lambda t: (t.clear(), t.update(tensors)))
    assert (logprobs(tmp_path) - reference_logprobs(source, weights)).abs().max() < 1e-4


def test_an_output_projection_that_is_quantised_is_taken_so(source, write, tmp_path):
    def picks(name):
        return name.endswith(("_proj.weight", "lm_head.weight"))

    weights = write(gptq(), gptq_config(lm_head=True), picks=picks)
    assert "lm_head.weight" in weights
    assert (logprobs(tmp_path) - reference_logprobs(source, weights)).abs().max() < 1e-4


def test_only_the_modules_that_are_listed_are_quantised(source, write, tmp_path):
    listed = [["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"], ["mlp.down_proj"]]

    def picks(name):
        return any(name.removesuffix(".weight").endswith(n) for names in listed for n in names)

    weights = write(gptq(), gptq_config(modules_in_block_to_quantize=listed), picks=picks)
    assert len(weights) == 2 * 4
    assert (logprobs(tmp_path) - reference_logprobs(source, weights)).abs().max() < 1e-4


def test_a_bias_of_zeros_where_the_model_has_none_is_taken_and_another_refused(
    source, write, tmp_path
):
    def edit(tensors):
        for name in [name for name in tensors if name.endswith("_proj.qweight")]:
            rows = tensors[name].shape[1]
            tensors[name.replace("qweight", "bias")] = torch.zeros(rows, dtype=torch.float16)

    weights = write(gptq(), gptq_config(), edit)
    assert (logprobs(tmp_path) - reference_logprobs(source, weights)).abs().max() < 1e-4
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[UP + "bias"][3] = 1
    save_file(tensors, tmp_path / "model.safetensors")
    refused(tmp_path, rf"{UP}bias: a bias that is not 0")


def test_real_biases_are_taken(checkpoint, tmp_path):
    source = checkpoint("llama-tied-biased", **SHAPE)
    order = gptq(group=32, order=shuffled)
    weights = store(source, tmp_path, order, gptq_config(group_size=32, desc_act=True))
    assert (logprobs(tmp_path) - reference_logprobs(source, weights)).abs().max() < 1e-4


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"bits": 3}, "GPTQ bits 3 is not supported: it takes 4, 8"),
        ({"bits": True}, "GPTQ bits True"),
        ({"bits": None}, "GPTQ bits None"),
        ({"group_size": 48}, "GPTQ group_size 48 .*takes 32, 64, 128, -1"),
        ({"group_size": "128"}, "GPTQ group_size '128'"),
        ({"sym": 1}, "GPTQ sym 1 .*takes True, False"),
        ({"desc_act": "yes"}, "GPTQ desc_act 'yes'"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'.*takes gptq, gptq_v2"),
        ({"format": "bitblas"}, "checkpoint_format 'bitblas'"),
        ({"pack_dtype": "int16"}, "pack_dtype 'int16'.*takes int32"),
        ({"dynamic": ["x"]}, r"dynamic \['x'\]: it takes patterns"),
        ({"dynamic": {"-:(": {}}}, r"dynamic '-:\(': .*unterminated"),
        ({"dynamic": {"x": 4}}, "dynamic 'x' has 4: it takes fields"),
        ({"dynamic": {"+:x": {"bits": 5}}}, r"GPTQ bits 5 of dynamic '\+:x'.*takes 4, 8"),
    ],
)
def test_a_config_that_is_not_supported_is_named_with_what_is(fields, says):
    with pytest.raises(CheckpointError, match=says):
        GptqConfig.from_checkpoint(gptq_config(**fields))


def test_a_merged_layer_of_two_schemes_is_refused():
    config = GptqConfig.from_checkpoint(gptq_config(dynamic={".*q_proj": {"bits": 8}}))
    with pytest.raises(CheckpointError, match="quantises them differently"):
        config.stored_layer([f"model.layers.0.self_attn.{part}_proj" for part in "qkv"])


def test_experts_in_activation_order_are_refused():
    config = GptqConfig.from_checkpoint(gptq_config(desc_act=True))
    with pytest.raises(CheckpointError, match=r"experts\.0\.up_proj: experts .*desc_act false"):
        config.stored_layer(["model.layers.0.mlp.experts.0.up_proj"])
    whole_rows = GptqConfig.from_checkpoint(gptq_config(desc_act=True, group_size=-1))
    assert not whole_rows.stored_layer(["model.layers.0.mlp.experts.0.up_proj"]).is_reordered


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
def test_a_missing_tensor_is_named(write, tmp_path, part):
    write(gptq(), gptq_config(), lambda tensors: tensors.pop(UP + part))
    refused(tmp_path, rf"lacks {UP}{part}; of {UP[:-1]} it holds")


def test_a_missing_order_is_named(write, tmp_path):
    config = gptq_config(group_size=32, desc_act=True)
    write(gptq(group=32, order=shuffled), config, lambda tensors: tensors.pop(UP + "g_idx"))
    refused(tmp_path, rf"lacks {UP}g_idx; of {UP[:-1]} it holds")


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("qweight", lambda t: t.T, r"has shape \[256, 16\].*\[16, 256\]"),
        ("qweight", lambda t: t.short(), "is of type I16, but int32 is needed"),
        ("qzeros", lambda t: t[:, 1:], r"has shape \[1, 31\].*\[1, 32\]"),
        ("qzeros", lambda t: t.half(), "is of type F16, but int32 is needed"),
        ("scales", lambda t: t.T, r"has shape \[256, 1\].*\[1, 256\]"),
        ("scales", lambda t: t.int(), "is of type I32, but bfloat16, float16, float32 is needed"),
        ("g_idx", lambda t: t[1:], r"has shape \[127\].*\[128\]"),
        ("g_idx", lambda t: t.long(), "is of type I64, but int32 is needed"),
    ],
)
def test_a_wrong_shape_or_type_is_named_with_the_right_one(write, tmp_path, part, change, says):
    def edit(tensors):
        tensors[UP + part] = change(tensors[UP + part]).contiguous()

    write(gptq(), gptq_config(), edit)
    refused(tmp_path, rf"{UP}{part} {says}")


@pytest.mark.parametrize(
    ("column", "group", "says"),
    [
        (5, 4, "column 5 is in group 4; it takes 0 to 3"),
        (7, -1, "column 7 is in group -1; it takes 0 to 3"),
        (9, None, "group . has 3[13] columns; every group has 32"),
    ],
)
def test_a_group_that_cannot_be_is_named_with_its_column(write, tmp_path, column, group, says):
    def edit(tensors):
        groups = tensors[UP + "g_idx"]
        groups[column] = (groups[column] + 1) % 4 if group is None else group

    config = gptq_config(group_size=32, desc_act=True)
    write(gptq(group=32, order=shuffled), config, edit)
    refused(tmp_path, rf"{UP}g_idx: {says}")


def test_an_order_that_the_config_denies_is_named(write, tmp_path):
    write(gptq(group=32, order=shuffled), gptq_config(group_size=32))
    refused(tmp_path, r"g_idx: column \d+ is in group \d, but desc_act .* is false")


def test_zero_points_that_the_config_denies_are_named(write, tmp_path):
    write(gptq(group=32, sym=False), gptq_config(group_size=32))
    refused(tmp_path, r"qzeros: zero points of symmetric weights \(sym true\) are 8.*it holds \d+")


@pytest.mark.parametrize("is_v2", [True, False])
def test_symmetric_zero_points_are_taken_in_either_form(source, write, tmp_path, is_v2):
    weights = write(gptq(is_v2=is_v2), gptq_config(checkpoint_format="gptq"))
    assert (logprobs(tmp_path) - reference_logprobs(source, weights)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("size", "fields", "says"),
    [
        (192, {}, "down_proj: 192 columns are not whole groups of 128"),
        (132, {"group_size": -1}, "down_proj: 132 columns cannot be packed by 8, as in GPTQ"),
    ],
)
def test_columns_that_are_no_whole_groups_are_named(checkpoint, tmp_path, size, fields, says):
    source = checkpoint("llama", **SHAPE | {"intermediate_size": size})
    shutil.copytree(source, tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = gptq_config(**fields)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    refused(tmp_path / "model", says)


def test_bitsandbytes_is_refused_with_what_to_take_instead():
    with pytest.raises(CheckpointError, match=r"'bitsandbytes'.*vllm quantize MODEL OUT --format"):
        resolve_quantization({"quant_method": "bitsandbytes", "load_in_4bit": True}, None, "m")
