"""After the start nothing compiles, whatever the lengths of requests: layers of real models."""

import gc
import json
import random

import pytest
import torch

from vllm import LLM, SamplingParams
from vllm.architectures.registry import builtin_config
from vllm.kernels.jit.monitor import MONITOR

pytestmark = pytest.mark.gpu
MODELS = ("Qwen3-8B-FP8", "Qwen3-30B-A3B-FP8", "Qwen3.5-35B-A3B-FP8")
NUM_LAYERS = 4  # of Qwen3.5 three with a recurrent state and one with attention
LENGTHS = (1, 2, 3, 5, 15, 16, 17, 31, 33, 63, 65, 100, 129, 250, 333, 511, 700, 1025, 1700, 2900)


def write_config(model: str, folder) -> str:
    config = builtin_config(model)
    text = config.get("text_config", config)
    text["num_hidden_layers"] = NUM_LAYERS
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:NUM_LAYERS]
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def start(folder: str, **options) -> LLM:
    gc.collect()
    torch.cuda.empty_cache()
    return LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096,
               max_num_seqs=64, gpu_memory_utilization=0.15, **options)  # fmt: skip


def serve(llm: LLM, count: int, seed: int) -> None:
    rng = random.Random(seed)
    prompts = [
        {"prompt_token_ids": [rng.randrange(1000) for _ in range(rng.choice(LENGTHS))]}
        for _ in range(count)
    ]
    params = [
        SamplingParams(temperature=rng.choice((0, 0.7)), top_p=rng.choice((1, 0.9)),
                       ignore_eos=True, detokenize=False, max_tokens=rng.randrange(1, 40))
        for _ in prompts
    ]  # fmt: skip
    llm.generate(prompts, params, use_tqdm=False)


# Every kernel of DeepGEMM that is asked for is waited for: of one model, with layers of both kinds.
@pytest.mark.parametrize(
    ("model", "wish", "options"),
    [
        *((model, "", {}) for model in MODELS),
        (MODELS[1], "VLLM_USE_DEEP_GEMM=1", {}),
        (MODELS[1], "", {"enforce_eager": True}),
        (MODELS[2], "", {"enforce_eager": True}),
        *((model, "", {"max_prompt_graph_tokens": 512}) for model in MODELS),
    ],
    ids=str,
)
def test_nothing_compiles_after_the_start(model, wish, options, tmp_path, monkeypatch):
    if wish:
        monkeypatch.setenv(*wish.split("="))
    llm = start(write_config(model, tmp_path), **options)
    for seed, count in enumerate((1, 3, 40)):
        serve(llm, count, seed)
    assert not llm.llm_engine.core.stats().compile_waits


def test_a_kernel_of_triton_that_compiles_is_counted_once(tmp_path, monkeypatch):
    from vllm.kernels.triton.attention import reshape_and_cache

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    MONITOR.watch()
    MONITOR.serve()
    key = torch.zeros(1, 3, 40, device="cuda", dtype=torch.bfloat16)  # of no model
    cache = torch.zeros(1, 16, 3, 40, device="cuda", dtype=torch.bfloat16)
    slots = torch.zeros(1, device="cuda", dtype=torch.int64)
    for _ in range(2):
        reshape_and_cache(key, key, cache, cache, slots)
    assert len(MONITOR.take()) == 1 and not MONITOR.take()
