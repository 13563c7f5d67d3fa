"""Calibrated scales of an FP8 KV cache: where checkpoints keep them, and what they change."""

import json
import logging

import pytest
import torch
from checkpoint_layouts import LAYOUTS, SHAPE, store
from safetensors.torch import load_file, save_file
from test_fp8 import PROMPT, logprobs

from vllm import LLM
from vllm.errors import CheckpointError
from vllm.formats.readers.registry import resolve_quantization
from vllm.model_executor.layers.attention import Attention
from vllm.ops.paged_attention import AttentionBatch

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
# Layout -> how its tool names the scales of K and V in a layer's attention.
NAMES = {
    "modelopt-fp8": ("k_proj.k_scale", "v_proj.v_scale"),
    "modelopt-nvfp4": ("k_proj.k_scale", "v_proj.v_scale"),
    "ct-fp8-channel": ("k_scale", "v_scale"),
    "ct-nvfp4": ("k_scale", "v_scale"),
}
SCALES = [(0.5, 0.03), (0.02, 4.0)]  # of K and V, by layer


@pytest.fixture(scope="module")
def source(checkpoint):
    return checkpoint("llama", **SHAPE)


def stored(source, folder, layout, edit=None, names=None, **config):
    """A checkpoint of `layout` with SCALES, under `names`."""
    build, own = LAYOUTS[layout]
    store(source, folder, build, own | config)
    tensors = load_file(folder / "model.safetensors")
    for layer, scales in enumerate(SCALES):
        for name, scale in zip(names or NAMES[layout], scales):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([scale])
    if edit is not None:
        edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(folder, **options):
    return LLM(folder, skip_tokenizer_init=True, max_num_seqs=2, **options)


def attentions(llm) -> list[Attention]:
    model = llm.llm_engine.core.executor.runner.model
    return [module for module in model.modules() if isinstance(module, Attention)]


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "auto"])
def test_scales_of_every_tool_reach_an_fp8_cache_and_no_other(
    source, tmp_path, layout, kv_cache_dtype
):
    llm = load(stored(source, tmp_path, layout), kv_cache_dtype=kv_cache_dtype)
    used = [(layer.kernel.k_scale, layer.kernel.v_scale) for layer in attentions(llm)]
    wanted = SCALES if kv_cache_dtype == "fp8" else [(1.0, 1.0)] * 2
    assert torch.equal(torch.tensor(used), torch.tensor(wanted))


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@torch.inference_mode()
def test_what_is_cached_is_divided_and_multiplied_again(source, tmp_path, backend):
    """K and V that E4M3 holds once they are divided come back exactly, though no scale of 1 could
    hold them: attention over one key is its value."""
    folder = stored(source, tmp_path, "ct-nvfp4")
    llm = load(folder, kv_cache_dtype="fp8", kernel=[f"*.attn={backend}"])
    layer = attentions(llm)[0].kernel
    v_scale = SCALES[0][1]
    v = torch.tensor([0.875, 448.0, -3.5, 0.001953125] * 8).reshape(1, 2, 16) * v_scale
    q, k = torch.ones(1, 8, 16), torch.ones(1, 2, 16)
    ints = [torch.tensor(values, dtype=torch.int32) for values in ([0, 1], [1], [[0]])]
    batch = AttentionBatch(*ints, torch.tensor([0]), torch.tensor([0]), 1, 1)
    out = layer(q, k, v, batch)
    assert torch.allclose(out, v.repeat_interleave(4, 1), rtol=1e-6)
    assert layer.v_cache[0, 0, 0, :4].tolist() == [0.875, 448.0, -3.5, 0.001953125]


def test_good_scales_are_nearer_to_the_wide_cache_than_none(source, tmp_path):
    def edit(tensors):
        for layer in range(2):
            for part in "kv":
                # K and V of some thousandths, which E4M3 without a scale rounds to steps of 2^-9.
                name = f"model.layers.{layer}.self_attn.{part}_proj"
                tensors[f"{name}.weight_scale"] *= 1e-3
                tensors[f"{name}.{part}_scale"] = torch.tensor(0.01 / 448)

    folder = stored(source, tmp_path, "modelopt-fp8", edit)
    wide = logprobs(folder)
    scaled = (logprobs(folder, kv_cache_dtype="fp8") - wide).abs().mean()
    tensors = load_file(folder / "model.safetensors")
    plain = {n: t for n, t in tensors.items() if not n.endswith((".k_scale", ".v_scale"))}
    save_file(plain, folder / "model.safetensors")
    unscaled = (logprobs(folder, kv_cache_dtype="fp8") - wide).abs().mean()
    assert scaled < unscaled / 2


def test_a_cache_without_scales_of_the_checkpoint_has_1_and_says_so_once(source, tmp_path, caplog):
    build, config = LAYOUTS["ct-nvfp4"]
    store(source, tmp_path, build, config)
    with caplog.at_level(logging.INFO):
        llm = load(tmp_path, kv_cache_dtype="fp8")
    assert {(a.kernel.k_scale, a.kernel.v_scale) for a in attentions(llm)} == {(1.0, 1.0)}
    assert [r for r in caplog.messages if "FP8 KV cache" in r] == [
        "FP8 KV cache: scale 1, for the checkpoint has no calibrated ones"
    ]


def test_scales_that_are_not_used_are_named_once(source, tmp_path, caplog):
    folder = stored(source, tmp_path, "ct-nvfp4", kv_cache_scheme=SCHEME)
    with caplog.at_level(logging.INFO):
        load(folder)
    assert len([r for r in caplog.messages if "--kv-cache-dtype fp8 uses them" in r]) == 1


@pytest.mark.parametrize(
    ("layout", "field", "scheme"),
    [
        ("ct-nvfp4", "kv_cache_scheme", SCHEME | {"strategy": "attn_head"}),
        ("ct-nvfp4", "kv_cache_scheme", SCHEME | {"type": "int"}),
        ("modelopt-nvfp4", "kv_cache_quant_algo", "NVFP4"),
        ("modelopt-nvfp4", "kv_cache_scheme", SCHEME | {"num_bits": 4}),
    ],
)
def test_scales_of_another_cache_are_left_aside_with_a_warning(
    source, tmp_path, caplog, layout, field, scheme
):
    folder = stored(source, tmp_path, layout, **{field: scheme})
    llm = load(folder, kv_cache_dtype="fp8")
    assert {(a.kernel.k_scale, a.kernel.v_scale) for a in attentions(llm)} == {(1.0, 1.0)}
    assert any("scales for its KV cache" in message for message in caplog.messages)


def test_a_checkpoint_may_quantise_its_cache_alone(source, tmp_path):
    stored(source, tmp_path, "ct-nvfp4")
    tensors = load_file(source / "model.safetensors")
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if name.endswith((".k_scale", ".v_scale")):
            tensors[name] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= {"config_groups": {}, "kv_cache_scheme": SCHEME}
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = load(tmp_path, kv_cache_dtype="fp8")
    assert [layer.kernel.k_scale for layer in attentions(llm)] == [0.5, pytest.approx(0.02)]
    assert torch.equal(logprobs(tmp_path), logprobs(source))


# ---------------------------------------------------------------- what is wrong


def refused(folder, says):
    for kv_cache_dtype in ("fp8", "auto"):
        with pytest.raises(CheckpointError, match=says):
            load(folder, kv_cache_dtype=kv_cache_dtype)


ATTENTION = "model.layers.1.self_attn"


def test_a_layer_without_scales_among_others_with_is_named(source, tmp_path):
    def edit(tensors):
        del tensors[f"{ATTENTION}.v_scale"]

    refused(stored(source, tmp_path, "ct-nvfp4", edit), rf"lacks {ATTENTION}\.attn\.v_scale")


@pytest.mark.parametrize("name", ["kv_scale", "attn.prob_scale", "k_proj.k_scale_2"])
def test_a_scale_that_is_not_known_is_refused_by_its_name(source, tmp_path, name):
    def edit(tensors):
        tensors[f"{ATTENTION}.{name}"] = torch.tensor(1.0)

    folder = stored(source, tmp_path, "ct-nvfp4", edit)
    refused(folder, rf"unknown to this model: {ATTENTION}\.{name}")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_cannot_be_is_refused(source, tmp_path, value):
    def edit(tensors):
        tensors[f"{ATTENTION}.k_scale"] = torch.tensor(value)

    refused(
        stored(source, tmp_path, "ct-nvfp4", edit),
        rf"{ATTENTION}\.k_scale: scales must be finite and above zero",
    )


def test_scales_of_heads_are_refused(source, tmp_path):
    def edit(tensors):
        tensors[f"{ATTENTION}.k_scale"] = torch.ones(2)

    refused(stored(source, tmp_path, "ct-nvfp4", edit), r"k_scale has shape \[2\].*implies \[\]")


def test_scales_of_queries_are_not_needed(source, tmp_path):
    def edit(tensors):
        tensors[f"{ATTENTION}.q_scale"] = torch.tensor(3.0)

    folder = stored(source, tmp_path, "ct-nvfp4", edit)
    assert len(PROMPT) - 1 == len(logprobs(folder, kv_cache_dtype="fp8"))


def test_a_cache_scheme_of_its_own_is_no_group():
    config = LAYOUTS["ct-nvfp4"][1] | {"config_groups": {}}
    with pytest.raises(CheckpointError, match="config_groups is missing or empty"):
        resolve_quantization(config, None, "model")
