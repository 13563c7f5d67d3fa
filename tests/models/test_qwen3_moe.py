"""Qwen3-MoE: its FP8 checkpoints, a token's bits in any company, and checkpoints that are wrong."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB
from transformers import AutoModelForCausalLM

from vllm import LLM, SamplingParams
from vllm.errors import CheckpointError, ConfigError
from vllm.model_executor.quantize import quantize_checkpoint
from vllm.utils.fp8 import per_block_cast_to_fp8

# Blocks of 128 end inside every weight, and inside the gate rows where up rows follow.
SHAPE = {
    "hidden_size": 180,
    "moe_intermediate_size": 152,
    "num_hidden_layers": 2,
    "num_experts": 7,
    "num_experts_per_tok": 3,
}
PROMPT = [(7 * i + 3) % VOCAB for i in range(50)]
EXPERTS = "model.layers.1.mlp.experts"
BLOCK_CONFIG = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def load(folder, **options) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, **{"max_num_seqs": 8} | options)


def prompt_logprobs(llm: LLM, prompts: list[list[int]]) -> list[torch.Tensor]:
    """float64 [tokens - 1, VOCAB] of each prompt, exactly as reported."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=VOCAB)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [
        torch.tensor(
            [[e[i].logprob for i in range(VOCAB)] for e in output.prompt_logprobs[1:]],
            dtype=torch.float64,
        )
        for output in llm.generate(inputs, params, use_tqdm=False)
    ]


def logprobs(folder, **options) -> torch.Tensor:
    return prompt_logprobs(load(folder, **options), [PROMPT])[0]


def greedy(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [o.outputs[0].token_ids for o in llm.generate(inputs, params, use_tqdm=False)]


def write(source, target, tensors: dict[str, torch.Tensor], **changes):
    """A checkpoint of `tensors` with the config of `source`, changed; None removes a field."""
    target.mkdir(exist_ok=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (target / "config.json").write_text(json.dumps(kept))
    return target


@torch.inference_mode()
def reference_logprobs(folder) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return torch.log_softmax(model(torch.tensor([PROMPT])).logits[0, :-1].double(), -1)


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def quantised(tensors, picks=is_linear, block=(128, 128)):
    """(FP8 block checkpoint, the same weights in float32)."""
    stored, widened = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if picks(name):
            q, scales = per_block_cast_to_fp8(weight, block)
            stored[name], stored[name + "_scale_inv"] = q, scales
            rows = torch.arange(weight.shape[0]) // block[0]
            columns = torch.arange(weight.shape[1]) // block[1]
            widened[name] = q.float() * scales[rows][:, columns]
    return stored, widened


@pytest.fixture(scope="module")
def source(checkpoint):
    return checkpoint("qwen3_moe", **SHAPE)


@pytest.fixture(scope="module")
def tensors(source):
    return load_file(source / "model.safetensors")


@pytest.fixture(scope="module")
def block_checkpoint(source, tensors, tmp_path_factory):
    """(FP8 checkpoint, checkpoint of the weights it stands for)."""
    folder = tmp_path_factory.mktemp("moe-fp8")
    stored, widened = quantised(tensors)
    return (
        write(source, folder / "block", stored, quantization_config=BLOCK_CONFIG),
        write(source, folder / "wide", widened),
    )


# ---------------------------------------------------------------- FP8


def test_block_checkpoint_matches_its_dequantised_weights(source, block_checkpoint):
    stored, widened = block_checkpoint
    wanted = reference_logprobs(widened)
    assert (logprobs(stored) - wanted).abs().max() < 1e-4
    assert (reference_logprobs(source) - wanted).abs().max() > 1e-2


def test_quantising_at_load_equals_quantising_before(source, block_checkpoint):
    assert torch.equal(logprobs(source, quantization="fp8"), logprobs(block_checkpoint[0]))


def test_a_copy_quantised_on_disk_equals_quantising_at_load(source, tmp_path):
    quantize_checkpoint(Path(source), tmp_path / "fp8", "fp8-block")
    assert torch.equal(logprobs(str(tmp_path / "fp8")), logprobs(source, quantization="fp8"))


def test_the_reference_backend_agrees_on_a_block_checkpoint(block_checkpoint):
    llm = load(block_checkpoint[0], moe_backend="torch")
    chosen = {d.chosen for _, d in records(llm, "moe")}
    assert chosen == {"torch"}
    native = logprobs(block_checkpoint[0])
    assert (prompt_logprobs(llm, [PROMPT])[0] - native).abs().max() < 1e-4


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_per_tensor_checkpoint_matches_its_dequantised_weights(source, tensors, tmp_path, scheme):
    stored, widened = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if is_linear(name):
            q, scale = per_block_cast_to_fp8(weight, weight.shape)
            stored[name], stored[name + "_scale"] = q, scale[0, 0].clone()
            widened[name] = q.float() * scale
            if scheme == "static":
                stored[name.replace("weight", "input_scale")] = torch.tensor(0.01)
    config = {"quant_method": "fp8", "activation_scheme": scheme}
    folder = write(source, tmp_path / "tensor", stored, quantization_config=config)
    wanted = reference_logprobs(write(source, tmp_path / "wide", widened))
    assert (logprobs(folder) - wanted).abs().max() < 1e-4


def test_experts_that_are_not_to_be_converted_stay_as_they_are(source, tensors, tmp_path):
    stored, widened = quantised(tensors, lambda n: is_linear(n) and not n.startswith(EXPERTS))
    config = BLOCK_CONFIG | {"modules_to_not_convert": [EXPERTS]}
    folder = write(source, tmp_path / "some", stored, quantization_config=config)
    wanted = reference_logprobs(write(source, tmp_path / "wide", widened))
    llm = load(folder)
    assert [str(d.problem.weight) for _, d in records(llm, "moe")] == ["fp8-block[128x128]", "fp32"]
    assert (prompt_logprobs(llm, [PROMPT])[0] - wanted).abs().max() < 1e-4


def test_bf16_experts_keep_their_bits_under_float32_activations(source, tensors, tmp_path):
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    folder = write(source, tmp_path / "bf16", halves, dtype="bfloat16")
    assert (logprobs(folder) - reference_logprobs(folder)).abs().max() < 1e-4


def records(llm: LLM, family: str):
    selection = llm.llm_engine.core.selection
    return [(name, d) for name, d in selection.records if d.problem.family == family]


def test_the_selector_gives_experts_to_the_native_kernels_and_routers_stay_plain(source):
    llm = load(source, quantization="fp8")
    assert {d.chosen for _, d in records(llm, "moe")} == {"cpu"}
    routers = [d.problem for name, d in records(llm, "linear") if name.endswith("mlp.gate")]
    assert [str(problem.weight) for problem in routers] == ["fp32", "fp32"]


# ---------------------------------------------------------------- in any company


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (1, 7, 33, 100)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprobs_have_the_same_bits_alone_batched_and_in_chunks(block_checkpoint, dtype):
    folder = block_checkpoint[0]
    llm = load(folder, dtype=dtype, enable_prefix_caching=False)
    batched = prompt_logprobs(llm, prompts()[1:])
    alone = [prompt_logprobs(llm, [prompt])[0] for prompt in prompts()[1:]]
    chunked = load(folder, dtype=dtype, max_num_batched_tokens=13, enable_prefix_caching=False)
    for one, many, pieces in zip(alone, batched, prompt_logprobs(chunked, prompts()[1:])):
        assert torch.equal(one, many)
        assert torch.equal(one, pieces)


def test_greedy_tokens_are_the_same_alone_batched_and_after_preemption(block_checkpoint):
    folder = block_checkpoint[0]
    llm = load(folder)
    alone = [greedy(llm, [prompt])[0] for prompt in prompts()]
    assert greedy(load(folder), prompts()) == alone
    small = load(folder, max_model_len=176, num_gpu_blocks_override=18)
    assert greedy(small, prompts()) == alone
    assert small.llm_engine.core.scheduler.num_preemptions > 0


# ---------------------------------------------------------------- checkpoints that are wrong


@pytest.fixture
def folder(source, tmp_path):
    """A private copy of a good checkpoint."""
    target = tmp_path / "model"
    shutil.copytree(source, target)
    return target


def refused(folder, says: str, error=CheckpointError, **options) -> None:
    with pytest.raises(error, match=says):
        load(folder, **options)


def edit(folder, change, **config):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    write(folder, folder, tensors, **config)


def test_a_missing_expert_is_named(folder):
    edit(folder, lambda tensors: tensors.pop(f"{EXPERTS}.6.up_proj.weight"))
    refused(folder, r"lacks model\.layers\.1\.mlp\.experts\.6\.up_proj\.weight")


def test_an_expert_too_many_is_named(folder):
    name = f"{EXPERTS}.7.up_proj.weight"
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(152, 180)}))
    refused(folder, r"unknown to this model: model\.layers\.1\.mlp\.experts\.7\.up_proj\.weight")


def test_an_expert_of_a_wrong_shape_is_named_with_both(folder):
    name = f"{EXPERTS}.2.gate_proj.weight"
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(151, 180)}))
    refused(folder, r"experts\.2\.gate_proj\.weight has shape \[151, 180\].*implies \[152, 180\]")


def test_a_router_of_a_wrong_shape_is_named(folder):
    name = "model.layers.0.mlp.gate.weight"
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(6, 180)}))
    refused(folder, r"mlp\.gate\.weight has shape \[6, 180\].*implies \[7, 180\]")


def test_experts_of_which_only_some_are_quantised_are_refused(source, tensors, tmp_path):
    stored, _ = quantised(tensors, lambda n: is_linear(n) and not n.startswith(f"{EXPERTS}.3."))
    folder = write(source, tmp_path / "some", stored, quantization_config=BLOCK_CONFIG)
    refused(folder, r"lacks model\.layers\.1\.mlp\.experts\.3\.\w+_proj\.weight_scale_inv")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_scales_that_are_no_scales_name_the_expert(block_checkpoint, tmp_path, value):
    tensors = load_file(block_checkpoint[0] / "model.safetensors")
    tensors[f"{EXPERTS}.4.down_proj.weight_scale_inv"][0, 1] = value
    folder = write(block_checkpoint[0], tmp_path / "bad", tensors)
    refused(folder, r"\.1\.mlp\.experts\.4\.down_proj\.weight_scale_inv: scales must be finite")


def test_nan_among_fp8_weights_names_the_expert(block_checkpoint, tmp_path):
    tensors = load_file(block_checkpoint[0] / "model.safetensors")
    tensors[f"{EXPERTS}.5.up_proj.weight"].view(torch.uint8)[3, 5] = 0xFF
    folder = write(block_checkpoint[0], tmp_path / "bad", tensors)
    refused(folder, r"layers\.1\.mlp\.experts: expert 5: .*NaN")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_experts_per_tok": 8}, "num_experts_per_tok = 8 is more than num_experts = 7"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok = 0 is out of range"),
        ({"num_local_experts": 0}, "num_experts = 0 is out of range"),
        ({"num_local_experts": 10**9}, "num_experts = 1000000000 is out of range"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size = -1 is out of range"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step = 0 is out of range"),
        ({"mlp_only_layers": [1]}, r"lacks model\.layers\.1\.mlp\.gate_proj"),
        ({"mlp_only_layers": 1}, "config.json"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_a_field_that_makes_no_sense_is_named(folder, changes, says):
    edit(folder, lambda tensors: None, **changes)
    refused(folder, says)


def test_a_backend_without_code_for_experts_is_refused(folder):
    refused(folder, "--moe-backend 'cpuu'.*did you mean cpu", ConfigError, moe_backend="cpuu")


def test_dummy_weights_need_no_checkpoint(folder):
    (folder / "model.safetensors").unlink()
    for options in ({}, {"quantization": "fp8"}):
        assert len(greedy(load(folder, load_format="dummy", **options), [[3, 4]])[0]) == 64
