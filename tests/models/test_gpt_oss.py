"""gpt-oss: checkpoints in MXFP4 and in floating point, on several ranks, and checkpoints that are
wrong. Greedy tokens and logits of the float32 model: test_against_transformers.py."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_layouts import mxfp4
from safetensors.torch import load_file
from test_qwen3_moe import logprobs, reference_logprobs, write

from vllm import LLM
from vllm.architectures.registry import builtin_config, describe
from vllm.entrypoints.cli.main import main
from vllm.errors import CheckpointError

MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}
# Groups of 32 columns, on two ranks too.
SHAPE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
ATTENTION, EXPERTS = "model.layers.1.self_attn", "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def source(checkpoint):
    return checkpoint("gpt_oss", **SHAPE)


@pytest.fixture(scope="module")
def tensors(source):
    return load_file(source / "model.safetensors")


def in_mxfp4(tensors):
    """(the tensors that gpt-oss is published with, those of the floats that they stand for)."""
    stored, wide = dict(tensors), dict(tensors)
    for name, stack in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            # [experts, columns, rows] as floats, [experts, rows, columns] in MXFP4.
            each = [mxfp4(np.ascontiguousarray(one.T.numpy())) for one in stack]
            del stored[name]
            stored[name + "_blocks"] = torch.stack([one[0] for one in each]).unflatten(-1, (-1, 16))
            stored[name + "_scales"] = torch.stack([one[1] for one in each])
            wide[name] = torch.stack([torch.from_numpy(one[2]).T for one in each]).contiguous()
    return stored, wide


@pytest.fixture(scope="module")
def published(source, tensors, tmp_path_factory):
    """(MXFP4 checkpoint, checkpoint of the weights it stands for)."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    stored, wide = in_mxfp4(tensors)
    written = write(source, folder / "mxfp4", stored, quantization_config=MXFP4)
    return written, write(source, folder / "wide", wide)


@pytest.mark.parametrize("options", [
    {},
    {"max_num_batched_tokens": 13},
    {"tensor_parallel_size": 2},
    pytest.param({"tensor_parallel_size": 2, "enable_expert_parallel": True},
                 marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_mxfp4_checkpoints_have_the_logits_of_their_weights(published, options):
    folder, wide = published
    assert (logprobs(folder, **options) - reference_logprobs(wide)).abs().max() < 1e-4


@pytest.mark.parametrize("options", [
    {"moe_backend": "torch", "attention_backend": "torch"},
    {"tensor_parallel_size": 2},
    pytest.param({"tensor_parallel_size": 2, "enable_expert_parallel": True},
                 marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_ranks_and_reference_kernels_give_the_logits_of_transformers(source, options):
    assert (logprobs(source, **options) - reference_logprobs(source)).abs().max() < 1e-4


# ---------------------------------------------------------------- what is wrong


def changed(name, change):
    def edit(tensors):
        return tensors | {name: change(tensors[name]).contiguous()}

    return edit


def without(name):
    return lambda tensors: {other: tensor for other, tensor in tensors.items() if other != name}


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (without(f"{ATTENTION}.sinks"), f"lacks {ATTENTION}.sinks"),
        (
            changed(f"{ATTENTION}.sinks", lambda t: t[:-1]),
            rf"{ATTENTION}.sinks has shape \[5\], but config.json implies \[6\]",
        ),
        (
            changed(f"{ATTENTION}.sinks", lambda t: t * float("nan")),
            f"{ATTENTION}.sinks: sinks must be finite",
        ),
        (
            changed(f"{ATTENTION}.sinks", lambda t: t.int()),
            f"{ATTENTION}.sinks is of type I32, but bfloat16, float16, float32 is needed",
        ),
        (
            changed(f"{EXPERTS}.gate_up_proj_bias", lambda t: t[:, :-2]),
            r"0.gate_proj.bias has shape \[63\], but config.json implies \[64\]",
        ),
        (
            changed(f"{EXPERTS}.down_proj_bias", lambda t: t[:-1]),
            f"lacks {EXPERTS}.5.down_proj.bias",
        ),
        (without("model.layers.0.mlp.router.bias"), "lacks model.layers.0.mlp.router.bias"),
    ],
)
def test_tensors_of_other_sizes_are_refused_by_name(source, tensors, tmp_path, edit, says):
    write(source, tmp_path / "wrong", edit(tensors))
    with pytest.raises(CheckpointError, match=says):
        LLM(tmp_path / "wrong", skip_tokenizer_init=True)


def test_sinks_of_another_name_and_size_are_refused_by_it(checkpoint, tmp_path):
    source, name = checkpoint("mimo_v2_flash"), "model.layers.1.self_attn.attention_sink_bias"
    tensors = load_file(source / "model.safetensors")
    write(source, tmp_path / "short", changed(name, lambda t: t[:-1])(tensors))
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[7\].*\[8\]"):
        LLM(tmp_path / "short", skip_tokenizer_init=True)


def one_more(dim):
    return lambda tensor: torch.cat((tensor, tensor.narrow(dim, 0, 1)), dim)


@pytest.mark.parametrize(
    ("stored", "dim"), [("blocks", 1), ("scales", 1), ("bias", 1), ("floats", 2)]
)
def test_stacks_that_gate_and_up_do_not_share_equally_are_refused(
    source, tensors, tmp_path, stored, dim
):
    name = f"{EXPERTS}.gate_up_proj"
    if stored == "floats":
        held, options = tensors, {}
    else:
        held, options = in_mxfp4(tensors)[0], {"quantization_config": MXFP4}
        name = f"{name}_{stored}"
    write(source, tmp_path / "wrong", changed(name, one_more(dim))(held), **options)
    says = rf"{name} has shape .*, but dimension {dim} holds gate_proj and up_proj of one size"
    with pytest.raises(CheckpointError, match=says):
        LLM(tmp_path / "wrong", skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sliding_window": 0}, r"sliding_window = 0 is out of range \(1 to"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types holds 'linear_att"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, but num_hidden_layers"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok = 7 is more than num_experts = 6"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha = 1.5, swiglu_limit = 2.0 are not supported"),
        ({"swiglu_limit": 0.0}, "swiglu_limit = 0.0 are not supported"),
    ],
)
def test_configs_without_a_meaning_are_refused(source, changes, says):
    config = json.loads((Path(source) / "config.json").read_text()) | changes
    with pytest.raises(CheckpointError, match=says):
        describe(config)


# ---------------------------------------------------------------- explained


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
@pytest.mark.parametrize("device", ["cpu", "sm_90"])
def test_explain_has_a_kernel_for_every_layer_that_takes_sinks_and_biases(name, device, capsys):
    config = builtin_config(name)
    words = ["kernels", "explain", name, "--device", device, "--libs", "all", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == {"served": True, "notes": []}
    chosen = {}
    for decision in found["decisions"]:
        family = decision["problem"]["family"]
        chosen.setdefault(family, set()).add(decision["chosen"])
    kernels = ("cpu", "cpu") if device == "cpu" else ("triton", "marlin")
    assert (chosen["attention"], chosen["moe"]) == ({kernels[0]}, {kernels[1]})
    text = json.dumps(found)
    if device != "cpu":
        assert "computes plain attention, not sinks" in text
    assert config["num_local_experts"] == {"gpt-oss-20b": 32, "gpt-oss-120b": 128}[name]
