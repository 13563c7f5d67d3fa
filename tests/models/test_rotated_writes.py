"""Models hand K and V to the kernel that rotates K, where that is what writes the cache.

The kernel is a GPU's (tests/native/test_layers_emulated.py has it); here the CPU's operations do
what it says, one after the other.
"""

import random

import pytest
from tiny_models import VOCAB

from vllm import LLM, SamplingParams
from vllm.model_executor.layers.attention import Attention
from vllm.ops import cpu_ops

PARAMS = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def rotary_into_cache(
    positions, query, key, target, cos_sin_cache, norms=None, eps=0.0, is_neox=True
):
    """As `cuda_ops.rotary_into_cache`; key is left as it was."""
    key = key.clone()
    if norms is None:
        cpu_ops.rotary_embedding(positions, query, key, cos_sin_cache, is_neox=is_neox)
    else:
        cpu_ops.qk_norm_rotary(positions, query, key, *norms, cos_sin_cache, eps, is_neox)
    caches = target.k_cache, target.v_cache
    scales = target.k_scale, target.v_scale
    cpu_ops.reshape_and_cache(key, target.value, *caches, target.slot_mapping, *scales)


def load(folder, **options) -> LLM:
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}
    return LLM(folder, skip_tokenizer_init=True, **defaults | options)


def tokens(llm: LLM) -> list[list[int]]:
    rng = random.Random(2)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (1, 9, 100, 40)]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [out.outputs[0].token_ids for out in llm.generate(inputs, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen2-window", "qwen3", "qwen3_moe", "ministral3", "qwen3_5", "qwen3_5_moe"),
        *("hunyuan_v1_dense", "afmoe"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8"}], ids=str)
def test_tokens_are_those_of_a_write_of_its_own(checkpoint, monkeypatch, name, options):
    folder = checkpoint(name)
    wanted = tokens(load(folder, **options))
    llm = load(folder, **options)
    monkeypatch.setattr(cpu_ops, "rotary_into_cache", rotary_into_cache, raising=False)
    layers = [m for m in llm.llm_engine.core.runner.model.modules() if isinstance(m, Attention)]
    for layer in layers:
        layer.kernel._write = None  # of a decision for `rotary`
    assert tokens(llm) == wanted
    assert all(bool(layer.kernel.k_cache.float().any()) for layer in layers)
