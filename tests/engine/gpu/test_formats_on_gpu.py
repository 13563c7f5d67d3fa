"""Checkpoints of every format on a GPU, and cut over two: the logits of a float32 model with their
weights."""

import gc
import json

import pytest
import torch
from checkpoint_layouts import LAYOUTS, is_projection, store
from safetensors.torch import load_file, save_file
from tiny_models import build_model
from transformers import AutoModelForCausalLM

from vllm import LLM, SamplingParams
from vllm.model_executor.checkpoint_formats import FORMATS
from vllm.model_executor.quantize import quantize_checkpoint

pytestmark = pytest.mark.gpu
VOCAB = 512
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 2, "vocab_size": VOCAB,
}  # fmt: skip
# A token goes to all experts: else the rounding of bfloat16 would send some elsewhere.
MODELS = {
    "llama": {},
    "qwen3_moe": {"moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 4},
}
# More tokens than our kernel multiplies itself, and fewer.
PROMPTS = [[(7 * i + 3) % VOCAB for i in range(n)] for n in (2, 9, 50, 300)]
# Of a log probability. The CPU in bfloat16 is 0.1 off at most, and 0.02 on average; an H100 has
# been 0.152 off.
MOST, MEAN = 0.2, 0.03
# On average, where activations are rounded to E4M3: emulated on the CPU they are 0.15 off.
MEAN_OF_QUANTISED = 0.3
# Layouts that come to the same weights as others once they are read, which is tested on the CPU.
SAME = {"ct-nvfp4", "ct-nvfp4a16", "ct-fp8-tensor", "ct-int4-w4a8", "awq-32", "modelopt-fp8-block"}
SAME |= {
    "ct-int8-static",
    "ct-mxfp8a16",
    "modelopt-mxfp8",
    "ct-mxfp4a16",
    "modelopt-mxfp4",
    "quark-mxfp4",
}
# On two GPUs, with these sizes, each rank has whole groups, and half of the rows of the block of
# 128 that is all of K, and of V. Without graphs, which take ranks longer to start with; on one GPU
# every format is captured.
NUM_GPUS = pytest.mark.parametrize(
    "num_gpus",
    [
        1,
        pytest.param(
            2,
            marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
        ),
    ],
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    made = {}

    def make(model):
        if model not in made:
            made[model] = tmp_path_factory.mktemp(model)
            build_model(model, **SIZES, **MODELS[model]).save_pretrained(made[model])
        return made[model]

    return make


@torch.inference_mode()
def expected_logprobs(folder) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device="cuda")
        logprobs = model(ids).logits[0].log_softmax(-1)
        found.append(logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].cpu())
    return found


def load(folder, **options) -> LLM:
    gc.collect()
    torch.cuda.empty_cache()
    return LLM(str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_num_seqs=8,
               max_model_len=512, num_gpu_blocks_override=300, **options)  # fmt: skip


def spread(num_gpus: int) -> dict:
    return {"tensor_parallel_size": num_gpus, "enforce_eager": num_gpus > 1}


def prompt_logprobs(llm: LLM) -> list[torch.Tensor]:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=0,
                            detokenize=False)  # fmt: skip
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    return [
        torch.tensor([entry[token].logprob for entry, token in zip(o.prompt_logprobs[1:], p[1:])])
        for o, p in zip(outputs, PROMPTS)
    ]


def chosen(llm: LLM) -> set[str]:
    """Who multiplies quantised weights, on the first rank."""
    decisions = llm.llm_engine.core.executor.kernels()["decisions"]
    return {d["chosen"] for d in decisions if d["problem"].get("weight", "bf16") != "bf16"}


def assert_near(found, expected):
    gaps = torch.cat([a - b for a, b in zip(found, expected)]).abs()
    assert float(gaps.max()) < MOST and float(gaps.mean()) < MEAN, (gaps.max(), gaps.mean())


def wide_copy(source, weights, folder):
    """A checkpoint without quantisation, of the weights that a quantised one stands for."""
    folder.mkdir()
    tensors = load_file(source / "model.safetensors") | weights
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


@NUM_GPUS
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in SAME])
def test_weight_only_kernels_give_the_logits_of_the_dequantised_weights(
    sources, layout, model, num_gpus, tmp_path
):
    source = sources(model)
    build, config = LAYOUTS[layout]
    stored = tmp_path / "stored"
    stored.mkdir()
    weights = store(source, stored, build, config, is_projection)
    moe_backend = "marlin" if model != "llama" else None
    llm = load(stored, linear_backend="marlin", moe_backend=moe_backend, **spread(num_gpus))
    assert chosen(llm) == {"marlin"}
    assert_near(prompt_logprobs(llm), expected_logprobs(wide_copy(source, weights, tmp_path / "w")))


@NUM_GPUS
@pytest.mark.parametrize("format_name", list(FORMATS))
def test_what_we_quantise_is_served(sources, format_name, num_gpus, tmp_path):
    """By whatever the selector likes best; beside torch's products with the weights made wide, on
    one GPU."""
    source = sources("llama")
    quantize_checkpoint(source, tmp_path / "out", format_name)
    found = prompt_logprobs(load(tmp_path / "out", **spread(num_gpus)))
    by_torch = prompt_logprobs(load(tmp_path / "out", linear_backend="torch"))
    rounds_x = format_name.startswith(("fp8", "int8"))
    gaps = torch.cat([a - b for a, b in zip(found, by_torch)]).abs()
    assert float(gaps.mean()) < (MEAN_OF_QUANTISED if rounds_x else 2 * MEAN)  # both round


@pytest.mark.parametrize(
    ("layout", "variable", "value"),
    [
        ("ct-fp8-block", "VLLM_TEST_FORCE_FP8_MARLIN", "1"),
        ("modelopt-nvfp4", "VLLM_NVFP4_GEMM_BACKEND", "marlin"),
    ],
)
def test_the_variables_that_ask_for_it_are_obeyed(
    sources, layout, variable, value, tmp_path, monkeypatch
):
    monkeypatch.setenv(variable, value)
    store(sources("llama"), tmp_path, *LAYOUTS[layout])
    llm = load(tmp_path, enforce_eager=True)
    assert chosen(llm) == {"marlin"}
    origins = {d.origin.text for _, d in llm.llm_engine.core.selection.records}
    assert f"{variable}={value}" in origins
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]
