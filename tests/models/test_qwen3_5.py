"""Qwen3.5: states of requests in any company, checkpoints of every layout, and wrong ones."""

import json
import logging
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from slow import quick
from tiny_models import VOCAB, one_thread
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, FineGrainedFP8Config

from vllm import LLM, SamplingParams
from vllm.errors import CheckpointError, ConfigError
from vllm.model_executor.quantize import quantize_checkpoint
from vllm.ops import torch_ops
from vllm.platforms import native as native_library
from vllm.worker.kv_cache import state_layers

# Multiples of the FP8 block where transformers infers the block from the number of scales.
BLOCK_SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 32,
}
LINEAR = "model.layers.1.linear_attn"


def load(folder, **options) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, **{"max_num_seqs": 8} | options)


def prompts(lengths=(1, 7, 33, 100), seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in lengths]


def prompt_logprobs(llm: LLM, token_lists: list[list[int]]) -> list[torch.Tensor]:
    """float64 [tokens - 1, VOCAB] of each prompt, exactly as reported."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=VOCAB)
    inputs = [{"prompt_token_ids": tokens} for tokens in token_lists]
    return [
        torch.tensor(
            [[e[i].logprob for i in range(VOCAB)] for e in output.prompt_logprobs[1:]],
            dtype=torch.float64,
        )
        for output in llm.generate(inputs, params, use_tqdm=False)
    ]


def greedy(llm: LLM, token_lists: list[list[int]], count: int = 24) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    inputs = [{"prompt_token_ids": tokens} for tokens in token_lists]
    return [o.outputs[0].token_ids for o in llm.generate(inputs, params, use_tqdm=False)]


@torch.inference_mode()
@one_thread()
def reference_logprobs(model, tokens: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([tokens]), use_cache=False).logits
    return torch.log_softmax(logits[0, :-1].double(), -1)


def write(source: Path, target: Path, tensors=None, **changes) -> Path:
    """A copy of `source` with other tensors and with `changes` to its config, or its text's."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    text = config.get("text_config", config)
    for field, value in changes.items():
        (text if field in text else config)[field] = value
    (target / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


# ---------------------------------------------------------------- in any company


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprobs_have_the_same_bits_alone_batched_and_in_chunks(checkpoint, dtype):
    folder = checkpoint("qwen3_5_moe")
    llm = load(folder, dtype=dtype)
    batched = prompt_logprobs(llm, prompts()[1:])
    alone = [prompt_logprobs(llm, [prompt])[0] for prompt in prompts()[1:]]
    chunked = load(folder, dtype=dtype, max_num_batched_tokens=13)
    for one, many, pieces in zip(alone, batched, prompt_logprobs(chunked, prompts()[1:])):
        assert torch.equal(one, many)
        assert torch.equal(one, pieces)


def test_a_request_takes_over_no_state_of_those_before_it(checkpoint):
    lengths = (1, 30, 2, 17, 1, 9, 25, 3, 40, 1)
    wanted = [greedy(load(checkpoint("qwen3_5")), [p])[0] for p in prompts(lengths)[:4]]
    llm = load(checkpoint("qwen3_5"), max_num_seqs=3, max_num_batched_tokens=8)
    for _ in range(2):
        assert greedy(llm, prompts(lengths))[:4] == wanted


def test_states_are_where_no_request_is_only_for_what_fills_up_a_graph(checkpoint):
    llm = load(checkpoint("qwen3_5"), max_num_seqs=3)
    greedy(llm, prompts())
    for layer in state_layers(llm.llm_engine.core.runner.model):
        assert len(layer.state) == len(layer.conv_state) == 4
        assert not layer.state[0].any()
        assert all(layer.state[slot].any() for slot in (1, 2, 3))


@one_thread()
def test_plain_torch_serves_the_same_model(checkpoint, monkeypatch, tmp_path):
    folder = checkpoint("qwen3_5_moe")
    native = prompt_logprobs(load(folder), prompts()[1:])
    tokens = greedy(load(folder), prompts())
    monkeypatch.setattr(native_library, "LIBRARY_DIR", tmp_path)
    llm = load(folder, max_num_batched_tokens=70)
    layers = state_layers(llm.llm_engine.core.runner.model)
    assert all(layer.ops is torch_ops for layer in layers)
    for one, other in zip(native, prompt_logprobs(llm, prompts()[1:])):
        assert (one - other).abs().max() < 1e-4
    assert greedy(llm, prompts()) == tokens


def test_states_of_more_requests_than_memory_holds_are_refused_with_a_number(checkpoint, tmp_path):
    sizes = {"linear_key_head_dim": 256, "linear_value_head_dim": 256}  # 3 MiB a request
    folder = write(checkpoint("qwen3_5"), tmp_path / "large", **sizes)
    with pytest.raises(
        ConfigError, match=r"--max-num-seqs 1048576: .* GiB.*lower --max-num-seqs to at most"
    ):
        load(folder, load_format="dummy", max_num_seqs=1 << 20)


def test_a_model_of_recurrent_layers_alone_needs_no_memory_for_keys(checkpoint):
    folder = checkpoint("qwen3_5", layer_types=None, full_attention_interval=100)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = prompt_logprobs(load(folder), prompts()[3:])[0]
    assert (reference_logprobs(model, prompts()[3]) - ours).abs().max() < 1e-4


def test_prefix_caching_is_off_and_says_so_once(checkpoint, caplog):
    with caplog.at_level(logging.INFO, "vllm"):
        llm = load(checkpoint("qwen3_5"))
    said = [r.message for r in caplog.records if "Prefix caching is off" in r.message]
    assert len(said) == 1
    params = SamplingParams(temperature=0, max_tokens=2)
    inputs = [{"prompt_token_ids": prompts()[3]}]
    for _ in range(2):
        assert llm.generate(inputs, params, use_tqdm=False)[0].num_cached_tokens == 0


@pytest.mark.parametrize("num_kept", quick([1, 16], [1]))
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_states_that_are_kept_change_no_token(checkpoint, name, num_kept):
    """Turns of conversations with one beginning, several at a time in a cache that is too small."""
    system, *turns = prompts((150, 140, 40, 9, 170, 33, 65))
    plain = load(checkpoint(name))
    kept = load(checkpoint(name), enable_prefix_caching=True, num_state_snapshots=num_kept,
                max_num_batched_tokens=100, max_model_len=512, num_gpu_blocks_override=70,
                max_num_seqs=3)  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    num_cached = 0
    for _ in range(2):
        texts = [[*system, *turn] for turn in turns]
        for _ in range(2):
            inputs = [{"prompt_token_ids": text} for text in texts]
            expected = plain.generate(inputs, params, use_tqdm=False)
            found = kept.generate(inputs, params, use_tqdm=False)
            num_cached += sum(output.num_cached_tokens for output in found)
            for one, other in zip(expected, found):
                assert one.outputs[0].token_ids == other.outputs[0].token_ids
                assert one.outputs[0].logprobs == other.outputs[0].logprobs
            texts = [[*t, *o.outputs[0].token_ids, 5, 6] for t, o in zip(texts, found)]
    assert num_cached > (2000 if num_kept == 16 else 100)


def test_a_number_of_states_to_keep_has_to_be_one(checkpoint):
    with pytest.raises(ConfigError, match="--num-state-snapshots 0: at least 1 is needed"):
        load(checkpoint("qwen3_5"), enable_prefix_caching=True, num_state_snapshots=0)


# ---------------------------------------------------------------- layouts of checkpoints


def test_vision_and_multi_token_prediction_are_skipped_with_one_line(checkpoint, tmp_path, caplog):
    source = checkpoint("qwen3_5_moe-multimodal")
    tensors = load_file(source / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in tensors)
    more = {"mtp.fc.weight": torch.zeros(3, 3), "mtp.layers.0.mlp.gate.weight": torch.zeros(3, 3)}
    with caplog.at_level(logging.INFO, "vllm"):
        llm = load(write(source, tmp_path / "mtp", tensors | more))
    assert sum("images are not supported" in record.message for record in caplog.records) == 1
    assert greedy(llm, prompts()) == greedy(load(source), prompts())


def test_experts_in_one_tensor_a_layer_are_those_that_are_stored_one_by_one(checkpoint, tmp_path):
    source = checkpoint("qwen3_5_moe")
    tensors = load_file(source / "model.safetensors")
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(4):
        name = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors[f"{name}.{e}.{part}_proj.weight"] for e in range(6)])
            for part in ("gate", "up", "down")
        )
        stacked |= {f"{name}.gate_up_proj": torch.cat((gate, up), 1), f"{name}.down_proj": down}
    folder = write(source, tmp_path / "stacked", stacked)
    one_by_one = prompt_logprobs(load(source), prompts()[3:])[0]
    assert torch.equal(prompt_logprobs(load(folder), prompts()[3:])[0], one_by_one)
    stacked[f"{name}.down_proj"] = stacked[f"{name}.down_proj"][:5].clone()
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.3\.mlp\.experts\.5\.down_pr"):
        load(write(source, tmp_path / "one-less", stacked))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe-multimodal"])
def test_a_copy_quantised_to_fp8_blocks_is_what_transformers_reads_in_it(
    checkpoint, tmp_path, name
):
    source, folder = checkpoint(name, **BLOCK_SHAPE), tmp_path / "fp8"
    quantize_checkpoint(source, folder, "fp8-block")
    llm = load(folder)
    formats = {
        layer.rpartition(".")[2]: str(decision.problem.weight)
        for layer, decision in llm.llm_engine.core.selection.records
        if decision.problem.family in ("linear", "moe")
    }
    kept = {layer for layer, weight in formats.items() if weight == "fp32"}
    assert kept == {"in_proj_ba", "lm_head"} | ({"gate"} if "moe" in name else set())
    assert set(formats.values()) == {"fp32", "fp8-block[128x128]"}
    ours = prompt_logprobs(llm, prompts()[3:])[0]
    assert torch.equal(prompt_logprobs(load(source, quantization="fp8"), prompts()[3:])[0], ours)
    cls = AutoModelForCausalLM if name == "qwen3_5" else AutoModelForImageTextToText
    model = cls.from_pretrained(
        folder, dtype=torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    assert (reference_logprobs(model.eval(), prompts()[3]) - ours).abs().max() < 2e-4
    plain = prompt_logprobs(load(source), prompts()[3:])[0]
    assert (plain - ours).abs().max() > 1e-2, "the formats must differ for this to mean much"


def test_dummy_weights_need_no_checkpoint(checkpoint, tmp_path):
    folder = write(checkpoint("qwen3_5_moe-multimodal"), tmp_path / "dummy")
    (folder / "model.safetensors").unlink()
    assert len(greedy(load(folder, load_format="dummy"), [[3, 4]])[0]) == 24


# ---------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    "part", ["A_log", "dt_bias", "conv1d.weight", "norm.weight", "in_proj_qkv.weight"]
)
def test_a_missing_weight_of_a_delta_net_is_named(checkpoint, tmp_path, part):
    tensors = load_file(checkpoint("qwen3_5") / "model.safetensors")
    del tensors[f"{LINEAR}.{part}"]
    folder = write(checkpoint("qwen3_5"), tmp_path / "bad", tensors)
    with pytest.raises(CheckpointError, match=rf"lacks {LINEAR}\.{part}"):
        load(folder)


@pytest.mark.parametrize(
    ("part", "shape", "implied"),
    [
        ("A_log", (5,), "[4]"),
        ("dt_bias", (4, 1), "[4]"),
        ("conv1d.weight", (176, 4), "[176, 1, 4]"),
        ("conv1d.weight", (176, 1, 3), "[176, 1, 4]"),
        ("norm.weight", (80,), "[20]"),
        ("in_proj_qkv.weight", (175, 48), "[176, 48]"),
        ("in_proj_a.weight", (2, 48), "[4, 48]"),
    ],
)
def test_a_weight_of_a_delta_net_with_a_wrong_shape_is_named(
    checkpoint, tmp_path, part, shape, implied
):
    tensors = load_file(checkpoint("qwen3_5") / "model.safetensors")
    tensors[f"{LINEAR}.{part}"] = torch.zeros(shape)
    folder = write(checkpoint("qwen3_5"), tmp_path / "bad", tensors)
    with pytest.raises(CheckpointError) as refusal:
        load(folder)
    assert f"{LINEAR}.{part} has shape {list(shape)}" in str(refusal.value)
    assert f"implies {implied}" in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]},
            r"layer_types\[3\] = 'sliding_attention': it takes linear_attention, full_attention",
        ),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ({"layer_types": ["linear_atention"] * 4}, "config.json"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads = 3 is not a multiple of .* = 2"),
        ({"linear_key_head_dim": 512}, r"linear_key_head_dim = 512 is out of range \(1 to 256\)"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim = 0 is out of range"),
        ({"attn_output_gate": False}, "attn_output_gate = False is not supported"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu' is not supported: it takes silu"),
    ],
)
def test_a_field_that_makes_no_sense_is_named(checkpoint, tmp_path, changes, says):
    folder = write(checkpoint("qwen3_5"), tmp_path / "bad", **changes)
    with pytest.raises(CheckpointError, match=says):
        load(folder)


def test_weights_of_experts_add_up_to_one_whatever_a_config_says(checkpoint, tmp_path):
    """transformers' Qwen3.5 router has no such field; Qwen3's has."""
    source = checkpoint("qwen3_5_moe")
    shutil.copytree(source, tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"norm_topk_prob": False}))
    for ours, theirs in zip(
        prompt_logprobs(load(tmp_path / "model"), prompts()),
        prompt_logprobs(load(source), prompts()),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
