"""MXFP4: rounding, gpt-oss's stacks of experts, kernels that are chosen, and what we write."""

import json

import pytest
import torch
from checkpoint_layouts import E2M1, LAYOUTS, SHAPE, is_expert, mxfp4, store
from safetensors.torch import load_file
from test_qwen3_moe import logprobs, reference_logprobs, write

from vllm import LLM
from vllm.entrypoints.cli.main import main
from vllm.errors import CheckpointError
from vllm.ops.mxfp4 import mxfp4_quantize
from vllm.ops.nvfp4 import e2m1_decode, unpack_e2m1
from vllm.utils.fp8 import ue8m0_decode

CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
EXPERTS = SHAPE | {"moe_intermediate_size": 64}
STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@pytest.fixture(scope="module")
def source(checkpoint):
    return checkpoint("qwen3_moe", **EXPERTS)


def store_stacks(source, folder, edit=lambda tensors: None, config=CONFIG):
    """Writes the experts of `source` as gpt-oss stores them; returns the float32 weights."""
    plain = load_file(source / "model.safetensors")
    stored = {name: tensor for name, tensor in plain.items() if not is_expert(name)}
    wanted = dict(stored)
    num_experts = 1 + max(int(name.split(".")[5]) for name in plain if is_expert(name))
    for layer in range(SHAPE["num_hidden_layers"]):
        parent = f"model.layers.{layer}.mlp.experts"
        for stack, parts in STACKS.items():
            blocks, scales = [], []
            for expert in range(num_experts):
                names = [f"{parent}.{expert}.{part}.weight" for part in parts]
                each = [mxfp4(plain[name].numpy()) for name in names]
                wanted |= {name: torch.from_numpy(one[2]) for name, one in zip(names, each)}
                # Rows of gate and up alternate.
                blocks.append(torch.stack([one[0] for one in each], 1).flatten(0, 1))
                scales.append(torch.stack([one[1] for one in each], 1).flatten(0, 1))
            stored[f"{parent}.{stack}_blocks"] = torch.stack(blocks).unflatten(-1, (-1, 16))
            stored[f"{parent}.{stack}_scales"] = torch.stack(scales)
    edit(stored)
    write(source, folder, stored, quantization_config=config)
    return wanted


# ---------------------------------------------------------------- numbers


def widened(packed, exponents):
    values = e2m1_decode(unpack_e2m1(packed))
    return values * ue8m0_decode(exponents).repeat_interleave(32, 1)


def test_every_weight_that_the_format_holds_is_kept():
    """All codes with all exponents but those at the ends of float32, in groups whose largest
    magnitude is 4 or 6."""
    exponents = torch.arange(1, 251)
    codes = torch.from_numpy(E2M1).repeat(len(exponents), 2)
    weight = codes * torch.exp2(exponents[:, None].float() - 127)
    packed, found = mxfp4_quantize(weight)
    assert torch.equal(found[:, 0], exponents.to(torch.uint8))
    assert torch.equal(widened(packed, found), weight)


def test_the_exponent_is_that_of_the_specification_or_the_next_where_it_is_nearer():
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)) * 0.02
    packed, exponents = mxfp4_quantize(weight)
    _, specified, plain = mxfp4(weight.numpy())
    assert set((exponents.int() - specified.int()).unique().tolist()) == {0, 1}

    def errors(found):
        return (found - weight).unflatten(1, (-1, 32)).square().sum(-1)

    ours, theirs = errors(widened(packed, exponents)), errors(torch.from_numpy(plain))
    assert bool((ours <= theirs * (1 + 1e-6)).all())
    same = exponents == specified
    assert torch.allclose(ours[same], theirs[same], rtol=1e-5)
    assert float(ours.sum()) < 0.97 * float(theirs.sum())


@pytest.mark.parametrize("value", [0.0, 2.0**-149, 2.0**-126, -(2.0**127)])
def test_groups_of_zeros_and_at_the_ends_of_float32_stay_finite(value):
    weight = torch.zeros(2, 64)
    weight[1, 40] = value
    packed, exponents = mxfp4_quantize(weight)
    assert int(exponents[0, 0]) == 127
    error = (widened(packed, exponents) - weight).abs().max()
    assert float(error) <= max(abs(value) / 4, 2.0**-128)


# ---------------------------------------------------------------- gpt-oss's stacks


@pytest.mark.parametrize("ranks", [1, 2])
def test_stacks_of_experts_have_the_logits_of_their_weights(source, tmp_path, ranks):
    wide = write(source, tmp_path / "wide", store_stacks(source, tmp_path / "stacks"))
    found = logprobs(tmp_path / "stacks", tensor_parallel_size=ranks)
    assert (found - reference_logprobs(wide)).abs().max() < 1e-4


GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("_scales", None, r"lacks model.layers.1.mlp.experts.0.gate_proj.weight_scales, "),
        ("_blocks", None, r"lacks model.layers.1.mlp.experts.0.gate_proj.weight_blocks, "),
        ("_scales", lambda t: t[..., :-1], r"gate_proj.weight_scales has shape \[64, 3\].*64, 4\]"),
        ("_blocks", lambda t: t[..., :-1], r"weight_blocks has shape \[64, 4, 15\].*\[64, 64\]"),
        ("_blocks", lambda t: t[:, :-2], r"weight_blocks has shape \[63, 64\].*\[64, 64\]"),
        ("_blocks", lambda t: t.short(), "weight_blocks is of type I16, but uint8 is needed"),
        ("_scales", lambda t: t.fill_(255), r"gate_proj.weight_scales: .*0 to 254; it holds 255"),
        ("_blocks", lambda t: t[:-1], r"lacks model.layers.1.mlp.experts.\d+.gate_proj.weight_bl"),
    ],
)  # fmt: skip
def test_a_broken_stack_is_refused_with_the_expert_that_lacks_it(
    source, tmp_path, part, change, says
):
    def edit(tensors):
        stack = tensors.pop(GATE_UP + part)
        if change is not None:
            tensors[GATE_UP + part] = change(stack).contiguous()

    store_stacks(source, tmp_path / "stacks", edit)
    with pytest.raises(CheckpointError, match=says):
        LLM(tmp_path / "stacks", skip_tokenizer_init=True, max_num_seqs=2)


# ---------------------------------------------------------------- kernels


@pytest.mark.parametrize(
    ("device", "chosen"),
    [("cpu", "cpu"), ("sm_80", "marlin"), ("sm_90", "marlin"), ("sm_100", "marlin"),
     ("sm_120", "marlin")],
)  # fmt: skip
def test_explain_tells_its_kernel(source, tmp_path, capsys, device, chosen):
    """Of dense layers and of experts."""
    store(source, tmp_path, *LAYOUTS["quark-mxfp4"])
    flags = ["--device", device, "--libs", "all", "--dtype", "bf16", "--json"]
    assert main(["kernels", "explain", str(tmp_path), *flags]) == 0
    decisions = json.loads(capsys.readouterr().out)["decisions"]
    found = {
        (d["problem"]["family"], d["chosen"])
        for d in decisions
        if d["problem"].get("weight") == "mxfp4"
    }
    assert found == {("linear", chosen), ("moe", chosen)}


@pytest.mark.slow
def test_two_ranks_have_the_logits_of_dense_layers(checkpoint, tmp_path):
    dense = checkpoint("qwen3", **SHAPE)
    weights = store(dense, tmp_path, *LAYOUTS["ct-mxfp4"])
    wide = write(dense, tmp_path / "wide", load_file(dense / "model.safetensors") | weights)
    found = logprobs(tmp_path, tensor_parallel_size=2)
    assert (found - reference_logprobs(wide)).abs().max() < 1e-4


# ---------------------------------------------------------------- what we write


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe"])
def test_what_we_write_has_the_layout_of_the_library_and_reads_back(checkpoint, tmp_path, model):
    source = checkpoint(model, **EXPERTS if model == "qwen3_moe" else SHAPE)
    command = ["quantize", str(source), str(tmp_path / "out"), "--format", "mxfp4"]
    assert main(command) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    assert config["format"] == "mxfp4-pack-quantized" and group["input_activations"] is None
    wanted = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    assert wanted.items() <= group["weights"].items()
    assert group["weights"]["scale_dtype"] == "torch.uint8"
    tensors, plain = load_file(tmp_path / "out" / "model.safetensors"), {}
    for name, weight in load_file(source / "model.safetensors").items():
        plain[name] = weight
        if name + "_packed" in tensors:
            plain[name] = widened(tensors[name + "_packed"], tensors[name + "_scale"])
            assert float((plain[name] - weight).norm()) < 0.13 * float(weight.norm())
    assert sum(name.endswith("_packed") for name in tensors) >= 14
    wide = write(source, tmp_path / "wide", plain)
    assert (logprobs(tmp_path / "out") - reference_logprobs(wide)).abs().max() < 1e-4
