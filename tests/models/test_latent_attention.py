"""Models with latent attention: formats, the cache, ranks, and what is refused."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, build_model
from transformers import AutoModelForCausalLM

from vllm import LLM, SamplingParams
from vllm.architectures.registry import describe
from vllm.errors import CheckpointError
from vllm.kernels.problems import attention_problems
from vllm.model_executor.quantize import quantize_checkpoint
from vllm.utils.fp8 import per_block_cast_to_fp8

PROMPT = [(7 * i + 3) % VOCAB for i in range(50)]
# Merged projections have shards that end inside a block of 128.
SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "kv_lora_rank": 136,
    "q_lora_rank": 144,
    "qk_nope_head_dim": 20,
    "v_head_dim": 24,
}


def logprobs(folder, **options) -> torch.Tensor:
    llm = LLM(folder, skip_tokenizer_init=True, max_num_seqs=4, **options)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=VOCAB)
    output = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)[0]
    return torch.tensor([[e[i].logprob for i in range(VOCAB)] for e in output.prompt_logprobs[1:]])


def as_fp8_blocks(source, target) -> dict[str, torch.Tensor]:
    """Writes attention and dense layers of a checkpoint in FP8 blocks, as DeepSeek does; gives all
    weights as they then are, in float32."""
    stored, wide = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        wide[name] = tensor
        is_stored = "_proj" in name and name.endswith("weight") and ".experts." not in name
        if not is_stored:
            stored[name] = tensor
            continue
        q, scales = per_block_cast_to_fp8(tensor, (128, 128))
        stored[name], stored[f"{name}_scale_inv"] = q, scales
        rows = torch.arange(tensor.shape[0]) // 128
        columns = torch.arange(tensor.shape[1]) // 128
        wide[name] = q.float() * scales[rows][:, columns]
    target.mkdir()
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["re:.*experts\\.[0-9]+.*", "lm_head"],
    }
    (target / "config.json").write_text(json.dumps(config))
    return wide


@torch.inference_mode()
def reference(folder, weights: dict[str, torch.Tensor], target) -> torch.Tensor:
    """Of a transformers model in float32 with `weights`."""
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    return torch.log_softmax(model(torch.tensor([PROMPT])).logits[0, :-1], -1)


@pytest.fixture(scope="module")
def source(checkpoint):
    return checkpoint("deepseek_v3", **SIZES)


def test_a_quantised_up_projection_is_absorbed_as_the_float32_weight_it_means(source, tmp_path):
    weights = as_fp8_blocks(source, tmp_path / "fp8")
    wanted = reference(source, weights, tmp_path / "wide")
    llm = LLM(tmp_path / "fp8", skip_tokenizer_init=True, max_num_seqs=4, dtype="bfloat16")
    entries = {e.layer: e for e in llm.llm_engine.core.selection.ledger.entries}
    for layer in range(2):
        entry = entries[f"model.layers.{layer}.self_attn.kv_b_proj"]
        assert entry.transform == "fp8-block[128x128] -> bfloat16, absorbed"
        assert 0 < entry.relative_error < 4e-3 and not entry.is_exact
    assert (logprobs(tmp_path / "fp8", dtype="float32") - wanted).abs().max() < 1e-4
    plain = logprobs(source, dtype="float32")
    assert (plain - wanted).abs().max() > 1e-2, "quantisation must be visible to be tested"


def test_our_own_quantiser_leaves_the_absorbed_weight_as_it_is(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "fp8", "fp8-block")
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    assert stored["model.layers.0.self_attn.q_b_proj.weight"].dtype == torch.float8_e4m3fn
    assert stored["model.layers.0.self_attn.kv_b_proj.weight"].dtype == torch.float32
    assert logprobs(tmp_path / "fp8").isfinite().all()


@pytest.mark.parametrize(("cache", "tolerance"), [("bfloat16", 0.2), ("fp8", 1.5)])
def test_a_narrower_cache_of_latents_stays_close(source, cache, tolerance):
    error = (logprobs(source, kv_cache_dtype=cache) - logprobs(source)).abs().max()
    assert 0 < error < tolerance


def test_kernels_are_asked_for_with_the_scale_of_the_scores(checkpoint):
    decoder = describe(json.loads((checkpoint("deepseek_v3") / "config.json").read_text()))
    spec = decoder.layers[0].mixer.attn
    problem, _ = attention_problems(spec, 1, "bf16", "bf16")
    temperature = 0.1 * 0.8 * math.log(decoder.ropes[""]["factor"]) + 1
    assert problem.softmax_scale == pytest.approx(20**-0.5 * temperature**2)


def test_a_token_of_the_cache_takes_one_latent_in_every_layer(source):
    llm = LLM(source, skip_tokenizer_init=True, num_gpu_blocks_override=9, max_model_len=64)
    model = llm.llm_engine.core.runner.model
    caches = [layer.mixer.attn.kernel.k_cache for layer in model.model.layers]
    assert [tuple(cache.shape) for cache in caches] == [(9, 16, 136 + 8)] * 2


def changed(source, target, change) -> None:
    """A copy whose config.json and tensors `change` changes in place."""
    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    change(config, tensors)
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def _up_projection_of_too_few_rows(config, tensors):
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    tensors[name] = tensors[name][:-1].contiguous()


def _bias_of_too_few_experts(config, tensors):
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors[name] = tensors[name][:-1].contiguous()


def _bias_that_is_no_number(config, tensors):
    tensors["model.layers.1.mlp.gate.e_score_correction_bias"][3] = float("nan")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_bias_that_is_no_number, "e_score_correction_bias: correction biases.* must be finite"),
        (lambda c, _: c.update(topk_group=9), "bad/config.json: topk_group = 9 of n_group = 4"),
        (lambda c, _: c.update(kv_lora_rank=0), "kv_lora_rank = 0 is out of range"),
        (lambda c, _: c.update(qk_rope_head_dim=7), "qk_rope_head_dim = 7 is odd"),
        (lambda c, _: c.update(v_head_dim=None), "v_head_dim"),
        (lambda c, _: c["rope_parameters"].update(mscale_all_dim="1"), "mscale_all_dim = '1'"),
        (lambda c, _: c.update(kv_lora_rank=64), r"has shape \[.*\], but config.json implies"),
        (_up_projection_of_too_few_rows, r"kv_b_proj.weight has shape \[263, 136\]"),
        (_bias_of_too_few_experts, r"e_score_correction_bias has shape \[7\]"),
    ],
)
def test_what_is_wrong_is_refused_by_name(source, tmp_path, change, text):
    changed(source, tmp_path / "bad", change)
    with pytest.raises(CheckpointError, match=text):
        LLM(tmp_path / "bad", skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("topk_method", "noaux_tc", "topk_method = 'noaux_tc': deepseek_v2 takes greedy"),
        ("norm_topk_prob", True, "norm_topk_prob = true: implementations of deepseek_v2 differ"),
    ],
)
def test_what_nobody_defines_for_v2_is_refused(checkpoint, tmp_path, field, value, text):
    changed(checkpoint("deepseek_v2"), tmp_path / "bad", lambda c, _: c.update({field: value}))
    with pytest.raises(CheckpointError, match=text):
        LLM(tmp_path / "bad", skip_tokenizer_init=True)


def test_layers_of_multi_token_prediction_are_skipped(source, tmp_path):
    def add(config, tensors):
        own = "model.layers.1."
        more = {n: t.clone() for n, t in tensors.items() if n.startswith(own)}
        tensors.update({n.replace(own, "model.layers.2."): t for n, t in more.items()})
        tensors["model.layers.2.eh_proj.weight"] = torch.zeros(4, 8)

    changed(source, tmp_path / "mtp", add)
    assert torch.equal(logprobs(tmp_path / "mtp"), logprobs(source))


def test_kimi_k2_is_read_as_the_v3_that_it_is(source, tmp_path):
    changed(source, tmp_path / "kimi", lambda c, _: c.update(model_type="kimi_k2"))
    assert torch.equal(logprobs(tmp_path / "kimi"), logprobs(source))


def test_the_models_of_the_tests_differ_from_one_another():
    """The reference of a model without latents of queries is another one."""
    assert hasattr(build_model("deepseek_v2").model.layers[0].self_attn, "q_proj")
    assert build_model("deepseek_v3").model.layers[0].self_attn.q_proj is None
