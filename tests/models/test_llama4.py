"""Llama 4: the layers of its description, what a config may not ask for, and their kernels."""

import json
from pathlib import Path

import pytest

from vllm.architectures.registry import describe
from vllm.entrypoints.cli.main import main
from vllm.errors import CheckpointError

CONFIGS = Path(__file__).parents[1] / "select" / "configs"
SCOUT = json.loads((CONFIGS / "Llama-4-Scout-17B-16E-Instruct-FP8-dynamic.json").read_text())


def with_text(**changes) -> dict:
    return SCOUT | {"text_config": SCOUT["text_config"] | changes}


def test_layers_rotate_within_their_chunk_or_see_everything_with_scaled_queries():
    layers = [layer.mixer for layer in describe(SCOUT).layers]
    for index, mixer in enumerate(layers):
        is_full = index % 4 == 3
        assert (mixer.rope is None, mixer.qk_norm is None) == (is_full, is_full)
        assert (mixer.query_scaling is not None) == is_full
        assert mixer.attn.variant == ("" if is_full else "chunks")


def test_maverick_has_experts_in_every_second_layer_and_no_norms():
    decoder = describe(with_text(moe_layers=None, interleave_moe_layer_step=2, use_qk_norm=False))
    parts = [type(layer.feed_forward).__name__ for layer in decoder.layers]
    assert parts == ["GatedMLP", "MoE"] * 24
    assert decoder.layers[0].feed_forward.down_proj.inputs.size == 16384
    assert {layer.mixer.qk_norm for layer in decoder.layers} == {None}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok = 2 is not supported in Llama 4: it tak"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries: it takes one for each of num_"),
        ({"layer_types": ["sliding_attention"] * 48}, r"layer_types\[0\] = 'sliding_attention'"),
        ({"attention_chunk_size": 0}, "attention_chunk_size = 0 is out of range"),
        ({"floor_scale": 0}, "floor_scale = 0 is out of range"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type 'yarn' is not supported in Llama 4: it takes default, linear, dynamic, lla",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ],
)
def test_a_field_that_makes_no_sense_is_named(changes, words):
    with pytest.raises(CheckpointError, match=words):
        describe(with_text(**changes))


@pytest.mark.parametrize("device", ["cpu", "sm_90", "sm_100"])
def test_explain_has_a_kernel_for_every_layer(tmp_path, capsys, device):
    (tmp_path / "config.json").write_text(json.dumps(SCOUT))
    command = ["kernels", "explain", str(tmp_path), "--device", device, "--libs", "all", "--json"]
    assert main([*command, "--tp", "4"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert found["model"] == {"served": True, "notes": []}
    assert all(decision["chosen"] for decision in found["decisions"])
    assert device != "sm_90" or "computes plain attention, not chunks" in text
