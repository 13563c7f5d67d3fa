"""Bytes of a decode step: those that lie in memory, and those of published models by hand."""

import argparse
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from selection_cases import linear, moe
from tiny_models import ARCHITECTURES

from vllm.config import ModelConfig, VllmConfig
from vllm.entrypoints.cli.kernels_explain import asked_model
from vllm.kernels.report.question import device_of
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import AttentionProblem
from vllm.kernels.selection import Selection
from vllm.kernels.step_bytes import (
    DecodeStep,
    LayerKind,
    experts_read,
    key_bytes,
    keys_seen,
    layer_kinds,
    total,
    weight_bytes,
)
from vllm.machine import Device, Lib, Libs
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.layer import FusedMoE
from vllm.model_executor.layers.linear import Linear
from vllm.model_executor.layers.recurrent import RecurrentLayer
from vllm.model_executor.model_loader import model_context
from vllm.model_executor.models.decoder import CausalLM

CONFIGS = Path(__file__).parent / "configs"
BLOCK_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
QUANTISATIONS = {
    "none": None,
    "block": BLOCK_FP8,
    "channel": {"quant_method": "fp8", "activation_scheme": "dynamic"},
}


def kinds_of(model: str, batch: int, context: int, tp: int = 1, device: str = "h200", **flags):
    given = {"dtype": "auto", "kv_cache_dtype": "auto", "quantization": None, "hf_overrides": None}
    args = argparse.Namespace(**{**given, **flags}, tp=tp, ep=1)
    asked = asked_model(model, args, device_of(device))
    return layer_kinds(asked.problems, asked.layers.items, DecodeStep(batch, context), tp, "bf16")


def of_parts(kinds: list[LayerKind]) -> dict[str, float]:
    found: Counter[str] = Counter()
    for kind in kinds:
        found[kind.name.partition(" (")[0]] += kind.bytes.weights
    return dict(found)


# ---------------------------------------------------------------- in memory


def model_in_memory(folder: Path, quantization: dict | None, tmp_path: Path):
    raw = json.loads((folder / "config.json").read_text())
    if quantization:
        raw["quantization_config"] = quantization
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = VllmConfig(
        model_config=ModelConfig.load(str(tmp_path), dtype="bfloat16", load_format="dummy")
    )
    selection = Selection(Device("cpu"), Libs.of([Lib("torch")]), Policy())
    with torch.device("meta"):
        model = CausalLM(model_context(config, selection, None))
    return model, config.model_config.decoder, selection.records


@pytest.mark.parametrize("quantization", QUANTISATIONS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_have_the_bytes_that_they_take_in_memory(name, quantization, checkpoint, tmp_path):
    model, decoder, records = model_in_memory(
        checkpoint(name), QUANTISATIONS[quantization], tmp_path
    )
    layers = [m for m in model.modules() if isinstance(m, Linear | FusedMoE)]
    assert layers
    for layer in layers:
        own = dict(layer.named_parameters(recurse=False))
        stored = sum(p.nbytes for key, p in own.items() if not key.endswith("input_scale"))
        assert weight_bytes(layer.problem) == stored, layer.prefix
    problems = [(layer, decision.problem) for layer, decision in records]
    # So many tokens that every expert is read.
    kinds = layer_kinds(problems, decoder.items(), DecodeStep(10_000, 1), 1, "bf16")
    names = {layer for kind in kinds for layer in kind.layers}
    assert names >= {layer.prefix for layer in layers}
    assert total(kinds).weights == pytest.approx(
        sum(weight_bytes(layer.problem) for layer in layers) + absorbed_bytes(model)
    )


def absorbed_bytes(model) -> int:
    """Of projections whose numbers become bfloat16, whatever they are stored as."""
    absorbed = [m.kv_b_proj for m in model.modules() if hasattr(m, "kv_b_proj")]
    return 2 * sum(layer.weight.numel() for layer in absorbed)


def test_weights_of_a_checkpoint_are_its_files_but_for_norms_and_the_embedding(checkpoint):
    folder = checkpoint("llama", tie_word_embeddings=False)
    sizes = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (safe_open is not iterable)
                sizes[name] = opened.get_tensor(name).nbytes
    no_kernel = ("norm.weight", "embed_tokens.weight")
    left_out = {name: size for name, size in sizes.items() if name.endswith(no_kernel)}
    assert len(left_out) == 2 * 3 + 1 + 1
    kinds = kinds_of(str(folder), 1, 1, dtype="float32")
    assert total(kinds).weights == sum(sizes.values()) - sum(left_out.values())


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3", "qwen3_5", "nemotron_h"])
def test_the_cache_of_a_token_and_states_are_those_that_the_engine_allocates(
    name, checkpoint, tmp_path
):
    model, decoder, records = model_in_memory(checkpoint(name), None, tmp_path)
    problems = [(layer, decision.problem) for layer, decision in records]
    attention = [m for m in model.modules() if isinstance(m, Attention)]
    recurrent = [m for m in model.modules() if isinstance(m, RecurrentLayer)]
    assert attention
    for layer in attention:
        assert key_bytes(layer.decision.problem) == layer.cache_spec.token_bytes(2, 1)
    for layer in recurrent:
        layer.allocate(3, torch.device("cpu"))
    one_slot = sum(m.conv_state[0].nbytes + m.state[0].nbytes for m in recurrent)
    kinds = layer_kinds(problems, decoder.items(), DecodeStep(5, 1), 1, "bf16")
    assert total(kinds).states == 2 * 5 * one_slot
    a_token = sum(layer.cache_spec.token_bytes(2, 1) for layer in attention)
    assert total(kinds).cache == 5 * (1 + 1) * a_token  # one key is read and written


# ---------------------------------------------------------------- published models, by hand


def test_qwen3_8b_reads_its_fp8_weights_and_a_bf16_output_projection():
    kinds = kinds_of("Qwen/Qwen3-8B-FP8", 1, 1024)
    sizes = of_parts(kinds)
    assert sizes["lm_head"] == 151936 * 4096 * 2 == 1_244_659_712
    fp8 = 36 * 4096 * (4096 + 2 * 1024 + 4096 + 2 * 12288 + 12288)
    scales = 36 * 4 * (48 * 32 + 32 * 32 + 192 * 32 + 32 * 96)
    assert fp8 == 6_945_767_424 and scales == 1_695_744
    assert total(kinds).weights == fp8 + scales + 1_244_659_712
    assert total(kinds).cache == 36 * 2 * 8 * 128 * 2 * (1024 + 1)
    assert total(kinds_of("Qwen3-8B-FP8", 64, 1024)).cache == 64 * total(kinds).cache
    half = kinds_of("Qwen3-8B-FP8", 1, 1024, kv_cache_dtype="fp8")
    assert total(half).cache == total(kinds).cache / 2
    of_two = kinds_of("Qwen3-8B-FP8", 1, 1024, tp=2)
    assert total(of_two).weights == total(kinds).weights / 2
    assert total(of_two).cache == total(kinds).cache / 2


def test_gpt_oss_120b_reads_four_experts_in_4_bits_and_half_of_its_layers_a_window():
    kinds = kinds_of(str(CONFIGS / "gpt-oss-120b.json"), 1, 1024)
    sizes = of_parts(kinds)
    one_expert = 3 * 2880 * 2880 // 2 + 3 * 2880 * 2880 // 32 + 4 * 3 * 2880
    assert sizes["mlp.experts"] == pytest.approx(36 * 4 * one_expert)
    assert sizes["self_attn.qkv_proj"] == 36 * ((64 + 8 + 8) * 64 * (2880 * 2 + 4))
    assert sizes["self_attn.o_proj"] == 36 * 2880 * (64 * 64 * 2 + 4)
    assert sizes["lm_head"] == 201088 * 2880 * 2
    attention = [kind.name for kind in kinds if kind.name.startswith("self_attn.attn")]
    assert attention == ["self_attn.attn (window 128, 64/8x64)", "self_attn.attn (64/8x64)"]
    a_token = 2 * 8 * 64 * 2
    assert total(kinds).cache == a_token * (18 * 1024 + 18 * 128 + 36)


def test_qwen3_next_reads_and_writes_the_states_of_its_delta_nets():
    kinds = kinds_of(str(CONFIGS / "Qwen3-Next-80B-A3B-Instruct-FP8.json"), 8, 4096)
    state = 4 * 32 * 128 * 128 + 2 * 3 * (2 * 16 * 128 + 32 * 128)
    assert total(kinds).states == 8 * 2 * 36 * state
    assert total(kinds).cache == 8 * 12 * 2 * 2 * 256 * 2 * (4096 + 1)
    sizes = of_parts(kinds)
    read = 512 * (1 - (1 - 10 / 512) ** 8)
    one_expert = 3 * 512 * 2048 + 4 * (2 * 4 * 16 + 16 * 4)
    assert sizes["mlp.experts"] == pytest.approx(48 * read * one_expert)


def test_deepseek_reads_one_latent_a_token():
    kinds = kinds_of("DeepSeek-V3.1", 2, 1000)
    assert total(kinds).cache == 2 * 61 * (512 + 64) * 2 * (1000 + 1)
    assert of_parts(kinds)["self_attn.kv_b_proj"] == 61 * 128 * (128 + 128) * 512 * 2


# ---------------------------------------------------------------- parts


def test_a_window_and_a_chunk_limit_the_keys():
    window = AttentionProblem(8, 2, 64, "bf16", sliding_window=128)
    chunks = AttentionProblem(8, 2, 64, "bf16", sliding_window=128, variant="chunks")
    whole = AttentionProblem(8, 2, 64, "bf16")
    assert [keys_seen(window, n) for n in (1, 128, 129)] == [1, 128, 128]
    assert [keys_seen(chunks, n) for n in (1, 128, 129, 256)] == [1, 128, 1, 128]
    assert keys_seen(whole, 129) == 129


def test_few_tokens_choose_few_experts_and_many_all():
    assert experts_read(moe(), 1) == pytest.approx(8)
    assert 15.7 < experts_read(moe(), 2) < 16
    assert experts_read(moe(), 10_000) == pytest.approx(256)
    assert experts_read(moe(cut_experts=4), 10_000) == pytest.approx(64)


def test_scales_and_biases_count():
    assert weight_bytes(linear()) == 4096 * 4096 + 4 * 32 * 32
    assert weight_bytes(linear("nvfp4")) == 4096 * 4096 // 2 + 4096 * 256 + 4
    assert weight_bytes(linear("bf16", bias=True)) == 2 * 4096 * 4096 + 4 * 4096
